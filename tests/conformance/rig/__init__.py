"""The rig that proves backends: scenarios, ways to run them, and oracles for their answers.

`tests/support/scenario_table.py` has the scenarios, `matrix` the cells of scenario, operator,
transform and dtype, `problem` and `trial` what one cell computes and with what it is compared,
`reference` the finite differences in NumPy, `checking` the verdicts and the table of what is tried.
"""
