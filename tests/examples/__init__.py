"""Runs the examples, the notebooks, the code in the documentation and the site."""
