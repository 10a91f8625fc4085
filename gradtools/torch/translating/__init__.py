"""PyTorch's programs in the vocabulary of the formula: what `gradtools.torch.vocabulary` uses."""
