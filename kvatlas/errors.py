"""The errors that a user of kvatlas may see.

KvatlasError                    one clear line: what was wrong, with which value, what was expected
 |- InvalidValue                a value from outside breaks a rule of the contract (ValueError too)
 |   |- UnknownTier             an unknown tier name
 |   |- WireError               bytes on the bus are not a kvatlas message, or have another version
 |   `- EngineEventError        an engine's payload or event can't be decoded
 |- SettingsError               a flag or environment variable is wrong
 |- Unreachable                 a server does not answer or can't serve requests now
 |   `- AccessDenied            it refuses our credentials, or the address is malformed
 |- LayoutMismatch              the store's layout has another version, or another P or S
 |   `- NoIndexYet              no indexer has created a layout yet
 |- UnsuitableStore             the store's configuration would lose data (it evicts keys, or is a read-only replica)
 |- OtherFleet                  this store and this NATS belong to two fleets
 `- NotSupported                this index was opened without a feature that the call needs
"""

import struct

DATA_ERRORS = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError, struct.error)
"""Errors that may be raised when something is computed from a value. Such values are refused where they enter. If a worker's
data raises one of these errors anyway, we refuse the data, count this under the worker's name, and continue. Every InvalidValue
is one of them."""


class KvatlasError(Exception):
    """The base of all errors here. Its text is a single line for the user."""


class InvalidValue(KvatlasError, ValueError):
    """A value from outside breaks a rule of the contract."""


class UnknownTier(InvalidValue):
    """An unknown tier name. Nothing is ever published for it."""


class WireError(InvalidValue):
    """Bytes on the bus are not a kvatlas message, or have an unknown version."""


class EngineEventError(InvalidValue):
    """An engine's payload or event can't be decoded."""


class SettingsError(KvatlasError):
    """A flag or environment variable is wrong."""


class Unreachable(KvatlasError):
    """A server does not answer at its address, or can't serve requests now. Waiting may help."""


class AccessDenied(Unreachable):
    """A server refuses our credentials, or its address is malformed. Waiting does not help."""


class OtherFleet(KvatlasError):
    """This store and this NATS belong to two fleets, which would take each other's workers."""


class LayoutMismatch(KvatlasError):
    """The store's layout has another version, or another number of partitions or shards."""


class NoIndexYet(LayoutMismatch):
    """No indexer has created a layout in the store yet."""


class UnsuitableStore(KvatlasError):
    """The store's configuration would lose data."""


class NotSupported(KvatlasError):
    """This index was opened without a feature that the call needs."""
