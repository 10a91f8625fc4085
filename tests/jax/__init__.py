"""Of the JAX wing alone."""
