"""PyTorch's implementation of `gradtools.seeing`: records and translates runs."""
