"""Recorders of PyTorch runs, whose effects are undone."""
