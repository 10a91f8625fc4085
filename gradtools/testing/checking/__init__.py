"""Checks derivatives and custom rules with finite differences and dot-product tests."""
