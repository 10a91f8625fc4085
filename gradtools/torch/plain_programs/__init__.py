"""Plain programs for operations that PyTorch differentiates wrongly, or not at all."""
