"""Costs that grow with a fleet: figures for `docs/scaling.md`. See `benchmarks.scaling.__main__`."""
