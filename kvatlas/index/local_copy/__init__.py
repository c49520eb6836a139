"""A copy of the shared index in a router's own process, filled from the store and kept up to date by the event stream."""
