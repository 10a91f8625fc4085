"""Recorders of PyTorch runs, which undo the side effects of a run."""
