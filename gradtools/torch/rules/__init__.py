"""Rules in PyTorch: how one is installed, transposed and held to its contract."""
