"""Conformance tests that every backend must pass."""
