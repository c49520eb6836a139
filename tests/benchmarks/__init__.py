"""Parts of the benchmarks that others build on."""
