"""Graphs of programs: nodes, recording, derivative flow, folding of repeats, and text output."""
