"""Tests gradtools.testing, and faults injected into users' functions."""
