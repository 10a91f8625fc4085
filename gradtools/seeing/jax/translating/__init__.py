"""Translation of a jaxpr into the graph of framework-neutral operations that `formula` reads."""
