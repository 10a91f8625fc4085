"""Reductions over all pairs of two batches, tile by tile, and the losses made of them."""
