"""Contains tests that import PyTorch and JAX in one process, to compare or nest the frameworks."""
