"""Where two graphs differ: canonical forms of their values, aligned step by step."""
