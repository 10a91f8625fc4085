"""Checks derivatives and custom rules by finite differences and dot-product tests."""
