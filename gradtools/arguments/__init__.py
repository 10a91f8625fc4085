"""Reads the arguments of operators.

`calls` represents f as a function of the flat differentiated arrays. `in_axes` finds the axis along
which each argument is split, `batches` splits the leaves, `chunks` splits the batch into chunks and
`chunk_outputs` concatenates the outputs. `static_arguments` separates a rule's static and dynamic
arguments. `checks` validates arguments, and `wording` describes values in messages.
"""
