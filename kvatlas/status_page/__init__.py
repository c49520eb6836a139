"""The human-readable status page of routers, indexers and sidecars: one page and one renderer, with different sections for each
process."""
