"""`match_parameters`: pairs the parameters of a torch.nn model with those of its JAX port."""
