"""Plain programs for what PyTorch differentiates wrongly, or not at all."""
