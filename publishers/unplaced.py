"""Stores whose parent is not known: what their blocks stand for can be told only when it is (a child announced before its
parent; a sidecar that began in the middle of an engine's life). Kept by parent, bounded, first told first forgotten.
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import replace

from kvatlas.events import EngineHash, EngineStored
from kvatlas.hashing import pack_tokens

MOST_TOKENS = 1 << 20
"""Kept at four bytes each."""

_Start = tuple[EngineHash, str | None, str | None]
"""First hash, adapter, salt: of two stores that agree in these, one goes on where the other ends."""


class Unplaced:
    """See the module. Decides nothing of where blocks belong."""

    def __init__(self, most_tokens: int = MOST_TOKENS) -> None:
        self._most_tokens = most_tokens
        self._tokens = 0
        self._behind: OrderedDict[EngineHash, dict[_Start, EngineStored]] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self._behind)

    def __iter__(self) -> Iterator[EngineStored]:
        return (event for behind in self._behind.values() for event in behind.values())

    def keep(self, event: EngineStored) -> None:
        """A store of blocks that follow an unknown one. Raises InvalidValue for token ids beyond 32 bits."""
        if event.parent is None or not event.hashes:
            return
        pack_tokens(event.token_ids)
        start = event.hashes[0], event.adapter, event.salt
        behind = self._behind.setdefault(event.parent, {})
        known = behind.get(start)
        if known is not None:
            if len(known.hashes) >= len(event.hashes):
                return
            self._tokens -= len(known.token_ids)
        behind[start] = replace(event, token_ids=array("I", event.token_ids))
        self._tokens += len(event.token_ids)
        while self._tokens > self._most_tokens:
            _, oldest = self._behind.popitem(last=False)
            self._tokens -= sum(len(one.token_ids) for one in oldest.values())

    def take(self, parent: EngineHash) -> list[EngineStored]:
        """What was kept behind `parent`, which is known now; it is kept no longer."""
        behind = list(self._behind.pop(parent, {}).values())
        self._tokens -= sum(len(event.token_ids) for event in behind)
        return behind
