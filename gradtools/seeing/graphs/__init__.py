"""Graphs of programs: nodes, recording, derivative flow, outlines and text output."""
