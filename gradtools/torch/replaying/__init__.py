"""Programs that run again chunk by chunk: what `chunked`, `checkpoint` and `frozen` are made of."""
