"""Benchmarks on real servers: `python -m benchmarks` measures every budget, `python -m benchmarks.longer` the rest."""
