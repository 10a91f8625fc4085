"""Rules in PyTorch: installation, transposition and checks."""
