"""Turns an engine's events about a shared store into changes of the store. Engine hashes become chains of sequence hashes.

The ledger knows which block an engine hash stands for. Hashes that the engine reported only for the store are remembered here
(LMCache names chunks by its own hashes). The ledger's rules apply: a known hash keeps its block; tokens alone identify a block
only while the engine uses no adapters, salts or images; blocks that can't be identified are left out and counted.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

from kvatlas.blocks.hashing import HASH_BYTES, extend_chain
from kvatlas.blocks.tiers import Tier
from kvatlas.errors import InvalidValue
from kvatlas.identity import OWN_CHAIN, Scope
from kvatlas_publishers.engine_events import EngineHash, EngineRemoved, EngineStored
from kvatlas_publishers.ledger.block import Namespace, Stretch
from kvatlas_publishers.ledger.connectors.connector_blocks import cut_chunks, part_name
from kvatlas_publishers.ledger.connectors.shared_store_notice import (
    AdapterGone,
    GoneFromStore,
    StoreChange,
    StoreCleared,
    StoredInStore,
)
from kvatlas_publishers.ledger.counters import LedgerCounters
from kvatlas_publishers.ledger.engine_groups import EngineGroups
from kvatlas_publishers.ledger.engine_hashes.resolver import BlockResolver, has_keys, with_root_salt
from kvatlas_publishers.ledger.lineage import Lineage
from kvatlas_publishers.ledger.residency import Residency

REMEMBERED_BLOCKS = 65_536
"""Blocks of the store that are remembered by their engine hash (about 300 bytes each)."""


class _Place(NamedTuple):
    """A block in its chain. `salt`: the prompts' salt, as given in events. `unproven`: identified by its tokens
    alone."""

    scope: Scope
    salt: str | None
    parent: bytes | None
    sequence_hash: bytes
    unproven: bool


class StoreWrites:
    """The store writes of one engine's ledger (pure). `take` returns the changes."""

    def __init__(self, counters: LedgerCounters) -> None:
        self._counters = counters
        self._places: OrderedDict[EngineHash, _Place] = OrderedDict()
        self._changes: list[StoreChange] = []
        self._found: tuple[Stretch | None, int] = (None, 0)
        """The stretch found last, and the position after it."""

    def follow(self, lineage: Lineage, resolver: BlockResolver, residency: Residency, groups: EngineGroups) -> None:
        """Set the parts of the ledger that know the engine's hashes from now on."""
        self._groups = groups
        self._lineage = lineage
        self._resolver = resolver
        self._residency = residency

    def take(self) -> list[StoreChange]:
        """The changes since the last call."""
        changes, self._changes = self._changes, []
        return changes

    def forget_names(self) -> None:
        """Forget the engine's hashes. The store keeps its blocks."""
        self._places.clear()

    def forget_unproven(self) -> None:
        """Forget blocks identified by tokens alone: the engine uses keys, so they may be wrong."""
        self._withdraw([name for name, place in self._places.items() if place.unproven])

    def forget_adapter(self, adapter: str) -> None:
        """Record that the engine reloaded the adapter from another path."""
        for name in [name for name, place in self._places.items() if place.scope.adapter_id == adapter]:
            del self._places[name]
        self._changes.append(AdapterGone(adapter))

    def clear(self) -> None:
        """Record that no block is left: the cache was reset, or the model has new weights."""
        self._changes.append(StoreCleared())

    def remove(self, event: EngineRemoved) -> EngineRemoved:
        """Record removed blocks. Returns the event without the store's blocks."""
        gone = {name for name in event.hashes if name in self._places}
        if not gone:
            return event
        self._withdraw(name for one in gone for name in (one, *self._parts(one)))
        return replace(event, hashes=[name for name in event.hashes if name not in gone])

    def store(self, event: EngineStored) -> None:
        """Record blocks that were stored (again) in the store."""
        size = self._resolver.block_size
        event = cut_chunks(event, size)
        sized = not event.token_ids or len(event.token_ids) == len(event.hashes) * event.block_size
        if not sized or event.block_size != size or self._resolver.lookahead_tokens:
            self._counters.store_unknown += len(event.hashes)
            return
        if not self._groups.is_full(event.group):
            return  # residency covers only full attention
        places = list(self._find_all(event))
        for name, place in zip(event.hashes, places, strict=True):
            if place is not None:
                self._places[name] = place
                self._places.move_to_end(name)
        while len(self._places) > REMEMBERED_BLOCKS:
            self._places.popitem(last=False)
        found = [place for place in places if place is not None]
        self._counters.store_told += len(found)
        self._counters.store_unknown += len(places) - len(found)
        for run in _runs(found):
            self._changes.append(StoredInStore(run[0].scope, _packed(run), run[0].parent))

    # ---------------------------------------------------------------- which block a hash stands for

    def _find_all(self, event: EngineStored) -> Iterator[_Place | None]:
        """The place of each of the event's hashes; None if unknown."""
        before = None if event.parent is None else self._find(event.parent, event)
        is_root = event.parent is None
        for at, name in enumerate(event.hashes):
            place = self._find(name) or self._compute(event, at, before, is_root=is_root)
            yield place
            before, is_root = place, False

    def _find(self, name: EngineHash, child: EngineStored | None = None) -> _Place | None:
        """The known place of a hash. `child`: an event with this hash as its parent; only its namespace counts."""
        stretch = self._lineage.known.get(name)
        if stretch is None:
            place = self._places.get(name)
        elif name in self._residency.shared.by_hash or stretch.namespace.chain != OWN_CHAIN:
            return None  # it stands for several blocks, or its key is valid in one engine only
        else:
            place = self._place_in(stretch, name)
        if place is None or child is None:
            return place
        same_salt = place.salt == child.salt or (child.salt is None and child.salt_inherited)
        return place if same_salt and place.scope.adapter_id == child.adapter else None

    def _compute(self, event: EngineStored, at: int, before: _Place | None, *, is_root: bool) -> _Place | None:
        """Compute a place from the event's tokens and the block before them."""
        if not event.token_ids or (self._resolver.uses_keys and not has_keys(event)):
            return None
        if before is None and not is_root:
            return None
        size, keys = event.block_size, event.extra_keys[at : at + 1] if event.extra_keys else None
        try:
            if before is None:
                root = self._lineage.namespace(event.adapter, event.salt, size)
                scope, salt, parent = self._scope_of(root), event.salt, None
                keys = with_root_salt(keys, root.root_salt)
            else:
                scope, salt, parent = before.scope, before.salt, before.sequence_hash
            above = None if parent is None else int.from_bytes(parent, "little")
            packed = extend_chain(event.token_ids[at * size : (at + 1) * size], size, above, keys)
        except InvalidValue:
            return None
        unproven = not has_keys(event) or (before is not None and before.unproven)
        return _Place(scope, salt, parent, packed, unproven)

    def _place_in(self, stretch: Stretch, name: EngineHash) -> _Place:
        """The place of a known hash. Most hashes directly follow the one that was looked up last."""
        at = 0
        if stretch.plain:
            before, at = self._found
            if before is not stretch or at >= len(stretch.names) or stretch.names[at] != name:
                at = stretch.names.index(name)
            self._found = stretch, at + 1
        first = at * HASH_BYTES
        if at:
            parent: bytes | None = stretch.hashes[first - HASH_BYTES : first]
        else:
            parent = None if stretch.parent is None else stretch.parent.hashes[-HASH_BYTES:]
        namespace, unproven = stretch.namespace, name in self._residency.unproven
        sequence_hash = stretch.hashes[first : first + HASH_BYTES]
        return _Place(self._scope_of(namespace), namespace.salt, parent, sequence_hash, unproven)

    def _scope_of(self, namespace: Namespace) -> Scope:
        return self._lineage.uses[namespace.scope_id].scope

    def _parts(self, chunk: EngineHash) -> Iterator[EngineHash]:
        """The names of a chunk's other blocks."""
        part = 0
        while (name := part_name(chunk, part)) in self._places:
            yield name
            part += 1

    def _withdraw(self, names: Iterable[EngineHash]) -> None:
        by_scope: dict[Scope, list[bytes]] = {}
        for name in list(names):
            if (place := self._places.pop(name, None)) is not None:
                by_scope.setdefault(place.scope, []).append(place.sequence_hash)
        self._changes += [GoneFromStore(scope, b"".join(hashes)) for scope, hashes in by_scope.items()]


def is_stores(event: EngineStored | EngineRemoved) -> bool:
    """True if the event is about a store that engines share. A store is shared if it evicts others' blocks without reporting
    it."""
    return event.tier is Tier.OBJECT_STORE and (isinstance(event, EngineRemoved) or not event.removal_told)


def _runs(places: Sequence[_Place]) -> Iterator[Sequence[_Place]]:
    """Runs of consecutive blocks of one chain."""
    first = 0
    for at, (one, following) in enumerate(pairwise(places), start=1):
        if following.parent != one.sequence_hash or following.scope != one.scope:
            yield places[first:at]
            first = at
    if places:
        yield places[first:]


def _packed(places: Sequence[_Place]) -> bytes:
    return b"".join(place.sequence_hash for place in places)
