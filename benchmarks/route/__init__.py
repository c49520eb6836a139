"""`route`: its latency, how it scales, and its throughput."""
