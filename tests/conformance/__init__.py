"""Contains conformance tests that every backend must pass."""
