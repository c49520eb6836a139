"""The overhead that `kvatlas router` adds to a request."""
