"""Tests with other packages in their own training loops and solvers."""
