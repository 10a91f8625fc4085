"""Makes this folder a package that takes precedence over an installed package `benchmarks`."""
