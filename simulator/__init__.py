"""A mock engine with a real paged KV cache that speaks vLLM's protocols, and workloads to drive it."""
