"""Defines and analyzes gradient graphs, and arranges the operations of a graph for drawing."""
