"""Recorders of a PyTorch run, as a graph; what the run changed is put back."""
