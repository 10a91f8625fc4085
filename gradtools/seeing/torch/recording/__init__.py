"""Records PyTorch runs, and undoes the side effects of each run."""
