"""Tests that import PyTorch and JAX in one process, to compare them or to nest one in the other."""
