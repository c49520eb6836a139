"""What `kvatlas router` adds to a request."""
