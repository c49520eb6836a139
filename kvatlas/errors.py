"""Every error a user of kvatlas may see.

KvatlasError                    one clear line: what was wrong, with which value, what was expected
 |- InvalidValue                a value from outside breaks a rule of the contract (ValueError too)
 |   |- UnknownTier             a tier's name that is none of ours
 |   |- WireError               bytes on the bus are not a message of ours, or of another version
 |   `- EngineEventError        an engine's payload or event can't be understood
 |- SettingsError               a flag or environment variable is wrong
 |- Unreachable                 a server does not answer, or can't do its work now
 |   `- AccessDenied            it does not accept our credentials or address
 |- LayoutMismatch              the store was laid out by another version or with other P, S
 |   `- NoIndexYet              no indexer has laid it out yet
 |- UnsuitableStore             the store's configuration would lose data (an evicting policy, a read-only replica)
 `- NotSupported                this index was opened without what the call needs
"""


class KvatlasError(Exception):
    """Its text is one line for a user."""


class InvalidValue(KvatlasError, ValueError):
    """A value from outside breaks a rule of the contract."""


class UnknownTier(InvalidValue):
    """A tier's name that is none of ours: nothing is ever told of that tier."""


class WireError(InvalidValue):
    """Bytes on the bus are not a message of ours, or of a version that we don't speak."""


class EngineEventError(InvalidValue):
    """An engine's payload or event can't be understood."""


class SettingsError(KvatlasError):
    """A flag or environment variable is wrong."""


class Unreachable(KvatlasError):
    """A server does not answer at its address, or can't do its work now."""


class AccessDenied(Unreachable):
    """A server does not accept our credentials, or its address can't be one: waiting does not help."""


class LayoutMismatch(KvatlasError):
    """The store was laid out by another version, or with another number of partitions or shards."""


class NoIndexYet(LayoutMismatch):
    """No indexer has laid the store out yet."""


class UnsuitableStore(KvatlasError):
    """The store's configuration would lose data."""


class NotSupported(KvatlasError):
    """This index was opened without what the call needs."""
