"""Gradient graphs: data structure, recording, derivative flow, layout and text output."""
