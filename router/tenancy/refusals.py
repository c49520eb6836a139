"""Reasons to refuse a request before reading it. The sender gets each message."""

from kvatlas.errors import KvatlasError


class Unproven(KvatlasError):
    """A request has no valid credentials."""


class ForeignTenant(KvatlasError):
    """A request names a tenant that its client may not use."""


class KeysUnknown(KvatlasError):
    """An issuer's keys can't be read, and never have been."""
