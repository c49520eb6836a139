"""A copy of the shared index in a router's own process: filled from the store, then kept by the event stream."""
