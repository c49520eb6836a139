"""Keeps stored events whose parent is unknown, since their blocks can't be identified without it: a child was reported before
its parent, or the sidecar started after its engine. The events are kept by parent, up to a limit; the oldest parent is
forgotten first.
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import replace

from kvatlas.blocks.hashing import HASH_BYTES, pack_tokens
from kvatlas_publishers.engine_events import EngineHash, EngineStored

MAX_TOKENS = 1 << 20
"""Maximum number of tokens that are kept, at four bytes each."""

_Step = tuple[EngineHash | None, EngineHash, str | None, str | None, str]
"""The hash before, the hash itself, adapter, salt, chain."""


class AwaitingParent:
    """See the module docstring. Does not decide where blocks belong."""

    def __init__(self, max_tokens: int = MAX_TOKENS) -> None:
        self._max_tokens = max_tokens
        self._tokens = 0
        self._by_parent: OrderedDict[EngineHash, list[EngineStored]] = OrderedDict()
        self._steps: set[_Step] = set()

    def __bool__(self) -> bool:
        return bool(self._by_parent)

    def __len__(self) -> int:
        return sum(map(len, self._by_parent.values()))

    def __iter__(self) -> Iterator[EngineStored]:
        return (event for events in self._by_parent.values() for event in events)

    def keep(self, event: EngineStored) -> None:
        """Keep an event with an unknown parent, without the leading steps that it shares with events already kept.

        Raises InvalidValue for token ids beyond 32 bits.
        """
        if event.parent is None:
            return
        pack_tokens(event.token_ids)
        first = next((i for i, step in enumerate(_steps(event)) if step not in self._steps), None)
        if first is None:
            return
        parent = event.hashes[first - 1] if first else event.parent
        rest = replace(
            event,
            hashes=event.hashes[first:],
            parent=parent,
            token_ids=array("I", event.token_ids[first * event.block_size :]),
            local_hashes=event.local_hashes and replace(event.local_hashes, hashes=event.local_hashes.hashes[first:]),
            sequence_hashes=event.sequence_hashes[first * HASH_BYTES :],
            extra_keys=event.extra_keys[first:] if event.extra_keys else None,
        )
        self._by_parent.setdefault(parent, []).append(rest)
        self._steps.update(_steps(rest))
        self._tokens += _size(rest)
        while self._tokens > self._max_tokens:
            self._forget(self._by_parent.popitem(last=False)[1])

    def take(self, parent: EngineHash) -> list[EngineStored]:
        """Remove and return the events that were waiting for `parent`, which is now known."""
        events = self._by_parent.pop(parent, [])
        self._forget(events)
        return events

    def _forget(self, events: list[EngineStored]) -> None:
        for event in events:
            self._tokens -= _size(event)
            self._steps.difference_update(_steps(event))


def _steps(event: EngineStored) -> Iterator[_Step]:
    """The event's steps from one hash to the next. Two events share a step if all its fields agree."""
    for before, name in zip([event.parent, *event.hashes], event.hashes, strict=False):
        yield before, name, event.adapter, event.salt, event.chain


def _size(event: EngineStored) -> int:
    """The size of an event in tokens; a hash counts as two."""
    if event.sequence_hashes:
        return 2 * len(event.hashes)
    return len(event.token_ids) if event.local_hashes is None else 2 * len(event.local_hashes.hashes)
