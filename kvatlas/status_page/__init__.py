"""The human-readable status page of routers, indexers and sidecars: one page and one renderer, with sections for each
process."""
