"""Translation of a jaxpr to expressions, for `formula`."""
