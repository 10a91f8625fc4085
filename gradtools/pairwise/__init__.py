"""Tiled reductions over all pairs of two batches, and losses built on them."""
