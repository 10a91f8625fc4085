"""Contains tests of the PyTorch backend only."""
