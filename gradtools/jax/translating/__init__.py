"""JAX's programs in the vocabulary of the formula: what `gradtools.jax.vocabulary` uses."""
