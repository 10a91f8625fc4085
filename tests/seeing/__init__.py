"""Tests of graphs, formulas, reports and costs."""
