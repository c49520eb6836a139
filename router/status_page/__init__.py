"""A router's status page."""
