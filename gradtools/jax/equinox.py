"""Exports the layer `GradientReversal` for ``equinox`` models."""

from gradtools.integrations.equinox import GradientReversal as GradientReversal
