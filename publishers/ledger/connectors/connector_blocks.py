"""Prepares a KV connector's events for the ledger: chunks larger than the engine's blocks, and stores that report no removals.

- LMCache stores and removes chunks of several blocks under one hash. A chunk is cut into blocks of the engine's size. Its last
  block gets the chunk's hash, so that the next chunk finds its parent; the others get names derived from it. They are stored
  and removed together.
- A shared store (Mooncake's, or a file system) evicts blocks of all its writers without reporting it. Its blocks are left out,
  or counted as held for some time after they were last stored. The same applies to LMCache chunks until the first removal of
  a chunk is reported, because the server may have no event stream.
- vLLM refuses to reset the device's cache while requests run, but resets its connector all the same, and reports neither
  (`reset_prefix_cache` with `reset_connector`). Its OffloadingConnector stores only what it does not hold, so a block that it
  stores again shows that the CPU tier has been emptied in the meantime.
- An offloaded event may omit the adapter, salt or extra keys of its blocks, so a known hash in it keeps its block.
"""

from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby

from kvatlas.blocks.hashing import HASH_BYTES
from kvatlas.blocks.tiers import Tier
from kvatlas_publishers.engine_events import EngineCleared, EngineEvent, EngineHash, EngineRemoved, EngineStored
from kvatlas_publishers.ledger.counters import LedgerCounters

TICKS_TO_LIVE = 4
"""A block in a store that reports no removals is held until the fourth tick after it was last stored."""

_Copy = tuple[Tier, int, EngineHash]
_PART = b"part\x00"


def part_name(chunk: EngineHash, part: int) -> bytes:
    """The name of one of a chunk's blocks other than the last one."""
    return _PART + part.to_bytes(4, "big") + (chunk if isinstance(chunk, bytes) else b"%d" % chunk)


class ConnectorBlocks:
    """Connector blocks of one engine. `held(tier, group, name)`: True if the ledger counts a copy."""

    def __init__(self, counters: LedgerCounters, held: Callable[[Tier, int, EngineHash], bool], *, keep: bool) -> None:
        """`keep`: hold blocks for some time if their removals are not reported; otherwise leave such blocks out."""
        self._counters = counters
        self._held = held
        self._keep = keep
        self._removes_chunks = False
        """True if the engine has reported the removal of a block in the CPU tier."""
        self._tick = 0
        self._stored_at: dict[_Copy, int] = {}
        """Tick of the last store of each block whose removal is not reported."""

    def stored(self, event: EngineStored, block_size: int | None) -> Sequence[EngineStored]:
        """The event in the form that the ledger folds; empty if its blocks are left out."""
        is_chunk = block_size is not None and event.block_size > block_size
        event = cut_chunks(event, block_size)
        if event.removal_told and (event.chunk_removal_told or self._removes_chunks or not is_chunk):
            return (event,)
        if not self._keep:
            self._counters.removal_untold += len(event.hashes)
            return ()
        copies = [(event.tier, event.group, name) for name in event.hashes]
        if any(copy in self._stored_at for copy in copies):  # stored again: extend the time of the same copy
            self._stored_at.update((copy, self._tick) for copy in copies if copy in self._stored_at)
            return [one for part in _single(event) for one in self._first_time(part)]
        self._stored_at.update(dict.fromkeys(copies, self._tick))
        return (event,)

    def _first_time(self, event: EngineStored) -> Sequence[EngineStored]:
        copy = event.tier, event.group, event.hashes[0]
        if copy in self._stored_at:
            return ()
        self._stored_at[copy] = self._tick
        return (event,)

    def removed(self, event: EngineRemoved) -> EngineRemoved:
        """The event, extended to all blocks of the chunks that it names."""
        self._removes_chunks = self._removes_chunks or event.tier is Tier.CPU_DRAM
        names = list(self._with_parts(event))
        for name in names:
            self._stored_at.pop((event.tier, event.group, name), None)
        return event if len(names) == len(event.hashes) else replace(event, hashes=names)

    def was_reset(self, events: Iterable[EngineEvent]) -> bool:
        """True if a batch shows that the CPU tier was emptied without a report."""
        removed: set[tuple[int, EngineHash]] = set()
        for event in events:
            if isinstance(event, EngineCleared):
                return False
            if isinstance(event, EngineRemoved) and event.tier is Tier.CPU_DRAM:
                removed.update((event.group, name) for name in event.hashes)
            elif isinstance(event, EngineStored) and event.tier is Tier.CPU_DRAM and _is_placeholder(event):
                held = (name for name in event.hashes if self._held(event.tier, event.group, name))
                if any((event.group, name) not in removed for name in held):
                    return True
        return False

    def clear(self, tiers: Collection[Tier]) -> None:
        """Record that all blocks of these tiers are gone."""
        self._stored_at = {copy: tick for copy, tick in self._stored_at.items() if copy[0] not in tiers}

    def ages(self) -> list[tuple[Tier, int, EngineHash, int]]:
        """Blocks whose removals are not reported, with the ticks since each was last stored, for `restore`."""
        return [(*copy, self._tick - tick) for copy, tick in self._stored_at.items()]

    def expire(self) -> list[EngineRemoved]:
        """Advance by one tick. Returns removals for the blocks whose time has passed."""
        self._tick += 1
        due = [copy for copy, tick in self._stored_at.items() if tick + TICKS_TO_LIVE <= self._tick]
        for copy in due:
            del self._stored_at[copy]
        return [EngineRemoved([name], tier, group) for tier, group, name in reversed(due)]

    def restore(self, copies: Iterable[_Copy], ages: Mapping[_Copy, int] | None = None) -> None:
        """Restore a saved ledger's blocks. All blocks of stores get a time to live, because the saved ledger does not
        record which stores report removals. `ages`: ticks elapsed per block; 0 for blocks without an age."""
        stores, aged = (Tier.LOCAL_SSD, Tier.OBJECT_STORE), ages or {}
        self._stored_at = {copy: self._tick - aged.get(copy, 0) for copy in copies if copy[0] in stores}

    def _with_parts(self, event: EngineRemoved) -> Iterator[EngineHash]:
        """The names in the event, together with those of the chunks' parts, child first."""
        for name in event.hashes:
            yield name
            parts = 0
            while self._held(event.tier, event.group, part_name(name, parts)):
                parts += 1
            yield from (part_name(name, part) for part in reversed(range(parts)))


def cut_chunks(event: EngineStored, block_size: int | None) -> EngineStored:
    """Split an event's chunks into blocks of the engine's size."""
    size = event.block_size
    if (
        block_size is None
        or size <= block_size
        or size % block_size
        or len(event.token_ids) != size * len(event.hashes)
    ):
        return event
    parts = size // block_size
    names: list[EngineHash] = []
    for chunk in event.hashes:
        names += [part_name(chunk, part) for part in range(parts - 1)]
        names.append(chunk)
    return replace(event, hashes=names, block_size=block_size, extra_keys=None)


def split_by_knowledge(event: EngineStored, known: Container[EngineHash]) -> Iterator[EngineStored]:
    """Split an offloaded event. Its known hashes become placeholders, so they keep their blocks. `known` may grow between the
    parts."""
    hashes, size = event.hashes, event.block_size
    if not event.offloaded or not event.token_ids or len(event.token_ids) != len(hashes) * size:
        yield event
        return
    first = 0
    for is_known, run in groupby(hashes, key=known.__contains__):
        last = first + len(list(run))
        yield replace(
            event,
            hashes=hashes[first:last],
            parent=hashes[first - 1] if first else event.parent,
            token_ids=() if is_known else event.token_ids[first * size : last * size],
            extra_keys=event.extra_keys[first:last] if event.extra_keys and not is_known else None,
        )
        first = last


def _is_placeholder(event: EngineStored) -> bool:
    """True for an event of vLLM's OffloadingConnector, which has neither tokens nor a block size."""
    return event.offloaded and not event.token_ids and not event.block_size


def _single(event: EngineStored) -> Iterator[EngineStored]:
    """Split the event into one event per block."""
    size, keys = event.block_size if event.token_ids else 0, event.extra_keys
    for at, name in enumerate(event.hashes):
        yield replace(
            event,
            hashes=[name],
            parent=event.hashes[at - 1] if at else event.parent,
            token_ids=event.token_ids[at * size : (at + 1) * size],
            extra_keys=keys[at : at + 1] if keys else None,
            sequence_hashes=event.sequence_hashes[at * HASH_BYTES : (at + 1) * HASH_BYTES],
        )
