"""Tests that import PyTorch and JAX in one process, to compare or to nest the frameworks."""
