"""Forward mode where PyTorch's own is wrong, lacking or dear."""
