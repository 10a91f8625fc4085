"""What PyTorch differentiates wrongly, with the right derivative or a refusal in its place."""
