"""Tests the public operators; each test runs once for each installed backend."""
