"""Tests of graphs, formulas and reports."""
