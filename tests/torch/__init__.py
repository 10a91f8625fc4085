"""Of the PyTorch wing alone."""
