"""JAX's implementation of `gradtools.seeing`: records and translates programs."""
