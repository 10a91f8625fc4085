"""Tests of the JAX backend only."""
