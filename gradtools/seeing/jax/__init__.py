"""JAX implementation of `gradtools.seeing`: records jaxprs as graphs and as formulas."""
