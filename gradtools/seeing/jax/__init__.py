"""JAX's implementation of `gradtools.seeing`: recording, measuring, translating programs."""
