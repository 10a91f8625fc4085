"""Exports the layer `GradientReversal` for ``flax.linen`` models."""

from gradtools.integrations.linen import GradientReversal as GradientReversal
