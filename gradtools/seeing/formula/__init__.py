"""The formula of a program and of its derivatives, as mathematics that can be read and checked.

`operations.py` is the vocabulary in which a wing records a program as a `Graph`.
"""
