"""Benchmark programs, as a package that takes precedence over installed `benchmarks`."""
