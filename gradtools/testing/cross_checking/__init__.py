"""`cross_check`: comparison of a program in PyTorch with the same program in JAX."""
