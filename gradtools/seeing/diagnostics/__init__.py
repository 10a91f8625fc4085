"""Implements `why_zero`, which reports lost gradients."""
