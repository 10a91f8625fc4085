"""How one run of a PyTorch function is written down as a graph, and put back afterwards."""
