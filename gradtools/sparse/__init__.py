"""Sparse Jacobians and Hessians: patterns, their detection, and compression by colouring."""
