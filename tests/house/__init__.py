"""Tests the code base: architecture, imports, leaks, namespaces and supported versions."""
