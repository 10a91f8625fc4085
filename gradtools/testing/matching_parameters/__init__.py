"""`match_parameters`: pairs the parameters of a torch.nn model and of its JAX port."""
