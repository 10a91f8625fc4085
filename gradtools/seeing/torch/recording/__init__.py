"""Recorders of PyTorch runs, which undo the effects of a run."""
