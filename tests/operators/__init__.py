"""The public operators, once for each installed backend."""
