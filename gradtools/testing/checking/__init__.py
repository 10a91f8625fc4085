"""Derivatives held against themselves: finite differences, dot products, kinks, rules."""
