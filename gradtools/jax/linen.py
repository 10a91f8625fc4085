"""Gradient reversal as a layer for ``flax.linen`` models."""

from gradtools.integrations.linen import GradientReversal as GradientReversal
