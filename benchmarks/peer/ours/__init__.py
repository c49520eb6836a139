"""kvatlas: what is in its store, and the router processes that are measured."""
