"""Tests gradtools in the training loops and solvers of other packages."""
