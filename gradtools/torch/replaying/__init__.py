"""Programs that run again chunk by chunk: what `chunked`, `frozen` and `microbatched` stand on."""
