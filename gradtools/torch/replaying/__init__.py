"""Programs that run again chunk by chunk: what `chunked`, `frozen` and `microbatched_value_and_grad` stand on."""
