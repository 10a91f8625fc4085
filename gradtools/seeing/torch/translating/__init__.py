"""Translation of a PyTorch run to expressions, for `formula`."""
