"""Graphs, formulas, reports and costs."""
