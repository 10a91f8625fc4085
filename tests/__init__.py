"""Laid out as the package is; what several tests use stands in support/."""
