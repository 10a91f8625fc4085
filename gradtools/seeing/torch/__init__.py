"""Implements `gradtools.seeing` for PyTorch: records runs as graphs and as formulas."""
