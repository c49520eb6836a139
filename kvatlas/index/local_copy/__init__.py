"""A copy of the shared index in a router's own process, filled from the store and updated by the event stream."""
