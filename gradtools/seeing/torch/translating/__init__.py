"""Translation of a PyTorch run into the graph of framework-neutral operations `formula` reads."""
