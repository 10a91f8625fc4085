"""`first_divergence` and `match_parameters`: comparison of a PyTorch program with its JAX port."""
