"""Exports the layer `GradientReversal` for ``flax.nnx`` models."""

from gradtools.integrations.nnx import GradientReversal as GradientReversal
