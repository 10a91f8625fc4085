"""What a backend is held to: programs, the ways of using them, and what says that all is right.

`records` has the scenarios, `matrix` the cells of scenario, operator, transform and dtype,
`problem` and `trial` what one cell computes and with what it is compared, `reference` the closed
forms and finite differences; `checking` is `gradtools check`.
"""
