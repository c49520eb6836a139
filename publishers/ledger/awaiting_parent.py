"""Stores whose parent is not known: what their blocks stand for can be told only when it is (a child announced before its
parent; a sidecar that began in the middle of an engine's life). Kept by parent, bounded, first told first forgotten.
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import replace

from kvatlas.blocks.hashing import pack_tokens
from kvatlas.events import EngineHash, EngineStored

MOST_TOKENS = 1 << 20
"""Kept at four bytes each."""

_Step = tuple[EngineHash | None, EngineHash, str | None, str | None]
"""Hash before, hash, adapter, salt."""


class Unplaced:
    """See the module. Decides nothing of where blocks belong."""

    def __init__(self, most_tokens: int = MOST_TOKENS) -> None:
        self._most_tokens = most_tokens
        self._tokens = 0
        self._behind: OrderedDict[EngineHash, list[EngineStored]] = OrderedDict()
        self._steps: set[_Step] = set()

    def __bool__(self) -> bool:
        return bool(self._behind)

    def __iter__(self) -> Iterator[EngineStored]:
        return (event for behind in self._behind.values() for event in behind)

    def keep(self, event: EngineStored) -> None:
        """A store of blocks that follow an unknown one; kept is what goes on from stores that were kept before.

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
            extra_keys=event.extra_keys[first:] if event.extra_keys else None,
        )
        self._behind.setdefault(parent, []).append(rest)
        self._steps.update(_steps(rest))
        self._tokens += len(rest.token_ids)
        while self._tokens > self._most_tokens:
            self._forget(self._behind.popitem(last=False)[1])

    def take(self, parent: EngineHash) -> list[EngineStored]:
        """What was kept behind `parent`, which is known now; it is kept no longer."""
        behind = self._behind.pop(parent, [])
        self._forget(behind)
        return behind

    def _forget(self, events: list[EngineStored]) -> None:
        for event in events:
            self._tokens -= len(event.token_ids)
            self._steps.difference_update(_steps(event))


def _steps(event: EngineStored) -> Iterator[_Step]:
    """Two stores of one step agree in all that leads from the hash before to the hash."""
    for before, name in zip([event.parent, *event.hashes], event.hashes, strict=False):
        yield before, name, event.adapter, event.salt
