"""`first_divergence` and `match_parameters`: comparison of a PyTorch model with its JAX port."""
