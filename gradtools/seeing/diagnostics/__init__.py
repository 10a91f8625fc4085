"""Diagnostics of lost gradients: `why_zero`, `dependence` and `guard_gradients`."""
