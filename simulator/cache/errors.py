"""The cache's errors, each with a one-sentence message. A refused call changes nothing.

CacheError (KvatlasError)
 |- SequenceNotFound      sequence 999 not found
 |- SequenceExists        sequence 7 exists already
 |- SequenceSwappedOut    sequence 7 is swapped out; swap it in first
 |- SequenceTooLong       sequence 7 would have 120 tokens; its max_tokens is 100
 |- UnknownDevice         device gpu:9 not found; expected one of gpu:0, gpu:1
 `- InsufficientBlocks    insufficient blocks: need 5, have 3
"""

from collections.abc import Iterable
from typing import TypeAlias

from kvatlas.errors import KvatlasError

SequenceId: TypeAlias = int | str


class CacheError(KvatlasError):
    """The cache can't do what was requested."""


class SequenceNotFound(CacheError):
    """No live sequence has this id."""

    def __init__(self, sequence_id: SequenceId) -> None:
        super().__init__(f"sequence {sequence_id} not found")
        self.sequence_id = sequence_id


class SequenceExists(CacheError):
    """A live sequence already has this id."""

    def __init__(self, sequence_id: SequenceId) -> None:
        super().__init__(f"sequence {sequence_id} exists already")
        self.sequence_id = sequence_id


class SequenceSwappedOut(CacheError):
    """The call needs the sequence's blocks on the device."""

    def __init__(self, sequence_id: SequenceId) -> None:
        super().__init__(f"sequence {sequence_id} is swapped out; swap it in first")
        self.sequence_id = sequence_id


class SequenceTooLong(CacheError):
    """The sequence would exceed its maximum length."""

    def __init__(self, sequence_id: SequenceId, tokens: int, max_tokens: int) -> None:
        super().__init__(f"sequence {sequence_id} would have {tokens} tokens; its max_tokens is {max_tokens}")
        self.sequence_id = sequence_id


class UnknownDevice(CacheError):
    """No cache has this device's name."""

    def __init__(self, device: str, devices: Iterable[str]) -> None:
        super().__init__(f"device {device} not found; expected one of {', '.join(devices)}")
        self.device = device


class InsufficientBlocks(CacheError):
    """The call needs more blocks than it can get."""

    def __init__(self, needed: int, available: int) -> None:
        super().__init__(f"insufficient blocks: need {needed}, have {available}")
        self.needed = needed
        self.available = available
