"""Rules in JAX: how one is installed, transposed and held to its contract."""
