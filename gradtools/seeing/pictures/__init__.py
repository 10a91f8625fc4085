"""Draws gradient graphs as SVG, Mermaid, Graphviz and interactive HTML."""
