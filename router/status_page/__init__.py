"""A router's page for people."""
