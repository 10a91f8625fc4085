"""Programs that run again chunk by chunk: what `chunked` and `frozen` stand on."""
