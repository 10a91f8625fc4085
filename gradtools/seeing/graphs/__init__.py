"""Graphs of programs: their nodes, how they are recorded, taken apart, folded and told as text."""
