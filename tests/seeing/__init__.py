"""Tests graphs, formulas and reports."""
