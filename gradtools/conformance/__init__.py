"""The conformance kit for backends: scenarios, ways to run them, and oracles for their answers.

`records` has the scenarios, `matrix` the cells of scenario, operator, transform and dtype,
`problem` and `trial` what one cell computes and with what it is compared, `reference` the closed
forms and finite differences; `checking` is `gradtools check`.
"""
