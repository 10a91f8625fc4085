"""Diagnostics of lost gradients: `why_zero`."""
