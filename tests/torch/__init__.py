"""Tests of the PyTorch backend only."""
