"""PyTorch's implementation of `gradtools.seeing`: recording, measuring, translating runs."""
