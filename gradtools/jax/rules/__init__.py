"""Implements rules in JAX: installation, transposition and checks."""
