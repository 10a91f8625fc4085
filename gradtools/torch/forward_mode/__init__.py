"""Forward mode where PyTorch's own is wrong, missing or slow."""
