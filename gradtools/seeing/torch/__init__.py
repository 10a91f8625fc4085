"""PyTorch implementation of `gradtools.seeing`: records runs as graphs and as formulas."""
