"""`first_divergence`: locates the operations at which a program and its JAX port diverge."""
