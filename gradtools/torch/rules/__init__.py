"""Implements rules in PyTorch: installation, transposition and checks."""
