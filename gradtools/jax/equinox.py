"""Gradient reversal as a layer for ``equinox`` models."""

from gradtools.integrations.equinox import GradientReversal as GradientReversal
