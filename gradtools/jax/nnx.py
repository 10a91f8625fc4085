"""Gradient reversal as a layer for ``flax.nnx`` models."""

from gradtools.integrations.nnx import GradientReversal as GradientReversal
