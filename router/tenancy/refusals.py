"""Why a request is refused before it is read; each line is for its sender."""

from kvatlas.errors import KvatlasError


class Unproven(KvatlasError):
    """A request shows nothing that counts."""


class ForeignTenant(KvatlasError):
    """A request names a tenant that its client may not speak for."""


class KeysUnknown(KvatlasError):
    """An issuer's keys can't be read now, and never were."""
