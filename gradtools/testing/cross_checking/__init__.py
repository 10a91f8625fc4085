"""Implements `cross_check`, which compares a program in PyTorch with the same program in JAX."""
