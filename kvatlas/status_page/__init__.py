"""The status page that routers, indexers and sidecars serve for people: one page, one renderer; each has its own sections."""
