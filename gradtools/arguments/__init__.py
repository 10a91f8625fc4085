"""How one call's arguments are read.

`calls` sees f as a function of the flat arrays that are differentiated; `in_axes` says on which
axis each argument is split, `batches` splits their leaves, `chunks` cuts the batch and
`chunk_outputs` joins what comes of it;
`static_arguments` sets apart what a rule takes as it is; `checks` and `wording` refuse what does
not fit.
"""
