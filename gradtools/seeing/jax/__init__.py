"""How a program of JAX is recorded, measured and written as formulas, for `gradtools.seeing`."""
