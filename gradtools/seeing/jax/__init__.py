"""Implements `gradtools.seeing` for JAX: records jaxprs as graphs and as formulas."""
