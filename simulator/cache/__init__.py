"""The paged KV cache."""
