"""A simulated engine with a real paged KV cache that speaks vLLM's protocols, workloads for it, and the demo."""
