"""How a run of PyTorch is recorded, measured and written as formulas, for `gradtools.seeing`."""
