"""Checks of derivatives: finite differences, dot-product tests, kinks, custom rules."""
