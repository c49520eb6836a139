"""The status page for people, served by routers, indexers and sidecars: one page and one renderer, each with its own
sections."""
