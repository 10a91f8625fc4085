"""Rules in JAX: installation, transposition and checks."""
