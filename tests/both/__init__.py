"""Both frameworks in one process: they agree, or one is inside the other."""
