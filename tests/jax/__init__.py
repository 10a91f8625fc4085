"""Contains tests of the JAX backend only."""
