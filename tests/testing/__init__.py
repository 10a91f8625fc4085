"""Tests gradtools.testing, and operators on functions into which faults are injected."""
