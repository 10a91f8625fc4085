"""JAX's programs in the vocabulary of the formula: what `programs` uses."""
