"""Keys of blocks, residencies, and overlaps, as the index returns them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, reduce
from operator import add
from struct import unpack
from types import MappingProxyType
from typing import NamedTuple, Self

from kvatlas.blocks.tiers import Tier
from kvatlas.identity import Scope


@dataclass(frozen=True, slots=True)
class BlockKey:
    """The full name of a block. A hash is 16 hex digits, or the caller's own text.

    `prefix_hash` is the block hash of the parent; for a first block, it is the session id or "root".
    """

    scope: Scope
    prefix_hash: str
    block_hash: str
    block_index: int
    token_count: int

    @property
    def model_id(self) -> str:
        return self.scope.model_id

    @property
    def tokenizer_id(self) -> str:
        return self.scope.tokenizer_id

    @property
    def adapter_id(self) -> str | None:
        return self.scope.adapter_id

    @property
    def tenant_id(self) -> str:
        return self.scope.tenant_id


@dataclass(frozen=True, slots=True)
class Residency:
    """One block that one worker holds in one tier.

    `bytes`: the block's size; 0 if the worker's publisher does not know it. `pinned`: the `put` pinned it. `resumable`: every
    cache group of the engine holds what a prompt needs in order to resume after this block (`kvatlas.blocks.kv_cache_groups`);
    None if the worker has no marks.
    """

    scope: Scope
    sequence_hash: int
    worker_id: str
    tier: Tier
    bytes: int = 0
    pinned: bool = False
    resumable: bool | None = None

    @classmethod
    def hbm(cls, worker_id: str, scope: Scope, sequence_hash: int, bytes: int = 0) -> Self:
        """A residency in the device's memory that is not pinned."""
        return cls(scope, sequence_hash, worker_id, Tier.HBM, bytes)


def residency_order(residency: Residency) -> tuple[int, str, Tier]:
    """The key by which residencies in answers are sorted: hash, worker, tier."""
    return residency.sequence_hash, residency.worker_id, residency.tier


WorkerRuns = tuple[tuple[int, int], ...]
"""(number of blocks looked up, flags byte) for each run."""

HOLDER_ENTRY_BYTES = 4
"""A holders value consists of entries of 4 bytes, sorted: the holder's number (24 bits, big-endian), then its flags byte."""


class ShardRuns(NamedTuple):
    """One shard's part of an overlap: `values[i]` is the holders value of `lengths[i]` consecutive blocks.

    `names` maps the numbers of active holders to their workers; any other holders in the values (retired, loading) are
    ignored. `positions`: for holders with marks, holder number -> index of the block at which the chain can be resumed.
    """

    values: Sequence[bytes]
    lengths: Sequence[int]
    names: Mapping[int, str]
    positions: Mapping[int, int] = MappingProxyType({})

    def reach(self) -> dict[str, int]:
        """See `Overlap.reach`."""
        if not self.positions:
            return {}
        return {self.names[holder]: at for holder, at in self.positions.items() if holder in self.names}

    def depths(self) -> dict[str, int]:
        """The number of leading blocks that each active worker holds. The work is per run and per change between runs."""
        if not self.values:
            return {}
        alive = {entry >> 8 for entry in _entries(self.values[0])}
        depth_of: dict[int, int] = {}
        before, position = self.values[0], self.lengths[0]
        for i in range(1, len(self.values)):
            value = self.values[i]
            for holder in _lost_holders(before, value) & alive:
                alive.discard(holder)
                depth_of[holder] = position
            before = value
            position += self.lengths[i]
        depth_of.update(dict.fromkeys(alive, position))
        return {self.names[holder]: depth for holder, depth in depth_of.items() if holder in self.names}

    def runs_by_worker(self) -> dict[str, WorkerRuns]:
        """Each active worker's (length, flags byte) runs, from the prompt's start on. Costs as much as `depths`."""
        names = self.names
        found = _runs_by_holder(tuple(self.values), tuple(self.lengths))
        return {names[holder]: runs for holder, runs in found.items() if holder in names}

    def runs_of(self, worker_id: str) -> list[tuple[int, int]]:
        """(length, flags byte) of each run, up to the point where the worker stops holding the prompt."""
        numbers = {number for number, name in self.names.items() if name == worker_id}
        runs: list[tuple[int, int]] = []
        for value, length in zip(self.values, self.lengths, strict=True):
            flags = next((entry & 0xFF for entry in _entries(value) if entry >> 8 in numbers), 0)
            if not flags:
                break
            runs.append((length, flags))
        return runs


def depths_by_holder(values: Sequence[bytes], lengths: Sequence[int]) -> dict[int, int]:
    """The number of leading blocks that each holder in the first run holds, by holder number."""
    runs = _runs_by_holder(tuple(values), tuple(lengths))
    return {holder: sum(length for length, _ in found) for holder, found in runs.items()}


@lru_cache(maxsize=512)
def _runs_by_holder(values: tuple[bytes, ...], lengths: tuple[int, ...]) -> Mapping[int, WorkerRuns]:
    """Runs by holder number. Cached, because routers see the same few values over and over."""
    if not values:
        return {}
    runs: dict[int, WorkerRuns] = {}
    since = {entry >> 8: (0, entry & 0xFF) for entry in _entries(values[0])}  # where the current flags begin
    before, position = values[0], lengths[0]
    for i in range(1, len(values)):
        value = values[i]
        for old, new in _changes(before, value):
            # a holder that only appears later does not hold the start, because it publishes at a different granularity
            if old is not None and (current := since.pop(old >> 8, None)) is not None:
                runs[old >> 8] = (*runs.get(old >> 8, ()), (position - current[0], current[1]))
                if new is not None:
                    since[new >> 8] = (position, new & 0xFF)
        before = value
        position += lengths[i]
    for holder, (start, flags) in since.items():
        runs[holder] = (*runs.get(holder, ()), (position - start, flags))
    return runs


def _lost_holders(before: bytes, after: bytes) -> set[int]:
    if (lost := _single_lost_entry(before, after)) is not None:
        return {lost >> 8}
    return {entry >> 8 for entry in _entries(before)} - {entry >> 8 for entry in _entries(after)}


def _single_lost_entry(before: bytes, after: bytes) -> int | None:
    """The only entry that is missing in `after`, if the values are otherwise equal (as adjacent runs usually are); otherwise
    None."""
    size = HOLDER_ENTRY_BYTES
    if len(before) != len(after) + size:
        return None
    differing = int.from_bytes(before[: len(after)], "little") ^ int.from_bytes(after, "little")
    at = ((differing & -differing).bit_length() - 1) // (8 * size) * size if differing else len(after)
    return int.from_bytes(before[at : at + size], "big") if before[at + size :] == after[at:] else None


def _changes(before: bytes, after: bytes) -> Iterator[tuple[int | None, int | None]]:
    """The differences between two `holders` values, as (entry before or None, entry after or None); never both None.

    Bisects to find the next difference, because adjacent runs mostly differ in one of hundreds of entries.
    """
    if (lost := _single_lost_entry(before, after)) is not None:
        yield lost, None
        return
    i = j = 0
    size = HOLDER_ENTRY_BYTES
    while i < len(before) or j < len(after):
        if before[i:] == after[j:]:
            return
        equal, unequal = 0, min(len(before) - i, len(after) - j) // size
        while equal < unequal:
            middle = (equal + unequal + 1) // 2
            start, end = equal * size, middle * size
            if before[i + start : i + end] == after[j + start : j + end]:
                equal = middle
            else:
                unequal = middle - 1
        i, j = i + equal * size, j + equal * size
        old = int.from_bytes(before[i : i + size], "big") if i < len(before) else None
        new = int.from_bytes(after[j : j + size], "big") if j < len(after) else None
        if old is not None and (new is None or old >> 8 <= new >> 8):
            i += size
        else:
            old = None
        if new is not None and (old is None or old >> 8 == new >> 8):
            j += size
        else:
            new = None
        yield old, new


def _entries(value: bytes) -> tuple[int, ...]:
    return unpack(f">{len(value) // HOLDER_ENTRY_BYTES}I", value)


class Overlap(NamedTuple):
    """Which workers hold how much of a prompt's start, counted in the blocks that are looked up (every granularity-th of the
    chain).

    Depths are exact, because residency is prefix-closed. The tiers of a run are exact at its first and last block. A verified
    lookup fills `differences`: (worker, depth by galloping, depth by a full walk). `source`: what gave the answer, if a router
    has a local copy of the index.
    """

    shards: Sequence[ShardRuns]
    looked_up: int
    differences: Sequence[tuple[str, int, int]] = ()
    source: str = ""

    @property
    def longest(self) -> int:
        """The number of leading blocks (of those looked up) that some holder has, active or not."""
        return max((sum(shard.lengths) for shard in self.shards), default=0)

    def depths(self) -> dict[str, int]:
        """How many leading blocks (of those looked up) each worker holds in any tier; workers that hold none are left out."""
        depths: dict[str, int] = {}
        for shard in self.shards:
            depths.update(shard.depths())  # a worker lives in one shard
        return depths

    def reach(self) -> dict[str, int]:
        """How many of the chain's first blocks each worker with marks can reuse, up to the lookup's limit (0: none). For
        workers that are not listed here, residency decides."""
        reach: dict[str, int] = {}
        for shard in self.shards:
            if shard.positions:
                reach.update(shard.reach())
        return reach

    def runs_by_worker(self) -> dict[str, WorkerRuns]:
        """Each worker's (length, flags byte) runs, from the prompt's start on (flags: `kvatlas.blocks.tiers`)."""
        if len(self.shards) == 1:
            return self.shards[0].runs_by_worker()
        runs: dict[str, WorkerRuns] = {}
        for shard in self.shards:
            runs.update(shard.runs_by_worker())  # a worker lives in one shard
        return runs

    def runs_of(self, worker_id: str) -> list[tuple[int, int]]:
        """(length, flags byte) of each run, up to the point where the worker stops holding the prompt (flags:
        `kvatlas.blocks.tiers`)."""
        for shard in self.shards:
            if runs := shard.runs_of(worker_id):
                return runs
        return []


class TierBlocks(NamedTuple):
    """Residencies by tier, in the order of the tiers."""

    hbm: int = 0
    remote_hbm: int = 0
    cpu_dram: int = 0
    local_ssd: int = 0
    object_store: int = 0


@dataclass(frozen=True, slots=True)
class ResidentBlocks:
    """Everything in one scope that the workers hold in one tier. `bytes`: each worker's blocks times the block size that it
    last reported; blocks of unknown size count as 0."""

    scope: Scope
    tier: Tier
    blocks: int
    bytes: int


class ResidentCount:
    """Adds up blocks and bytes by scope id and tier."""

    def __init__(self) -> None:
        self._found: dict[tuple[bytes, Tier], tuple[int, int]] = {}

    def add(self, scope_id: bytes, tier: Tier, blocks: int, block_bytes: int) -> None:
        before, bytes_before = self._found.get((scope_id, tier), (0, 0))
        self._found[scope_id, tier] = before + blocks, bytes_before + blocks * block_bytes

    @property
    def scope_ids(self) -> set[bytes]:
        return {scope_id for scope_id, _ in self._found}

    def by_scope(self, scopes: Mapping[bytes, Scope]) -> list[ResidentBlocks]:
        """The counts, sorted by the text of the scopes, then by tier."""
        rows = [ResidentBlocks(scopes[id], tier, *held) for (id, tier), held in self._found.items()]
        return sorted(rows, key=lambda row: (str(row.scope), row.tier))

    def by_model(self, scopes: Mapping[bytes, Scope]) -> "IndexMetrics":
        """The counts, summed over each model's scopes."""
        blocks: dict[str, list[int]] = {}
        sizes: dict[str, list[int]] = {}
        for (scope_id, tier), (held, size) in self._found.items():
            model_id = scopes[scope_id].model_id
            blocks.setdefault(model_id, [0] * len(Tier))[tier] += held
            sizes.setdefault(model_id, [0] * len(Tier))[tier] += size
        return IndexMetrics({one: ModelBlocks(TierBlocks(*blocks[one]), TierBlocks(*sizes[one])) for one in blocks})


@dataclass(frozen=True, slots=True)
class ModelBlocks:
    """Everything that the workers hold of one model, over all its scopes, by tier: residencies, and bytes (see
    `ResidentBlocks`)."""

    blocks: TierBlocks = field(default_factory=TierBlocks)
    bytes: TierBlocks = field(default_factory=TierBlocks)

    def plus(self, other: "ModelBlocks") -> "ModelBlocks":
        return ModelBlocks(
            TierBlocks(*map(add, self.blocks, other.blocks)), TierBlocks(*map(add, self.bytes, other.bytes))
        )


@dataclass(frozen=True, slots=True)
class IndexMetrics:
    """The current size of the index, by model id."""

    models: Mapping[str, ModelBlocks]

    @property
    def tiers(self) -> TierBlocks:
        """The residencies of all models."""
        return reduce(ModelBlocks.plus, self.models.values(), ModelBlocks()).blocks

    @property
    def resident_blocks(self) -> int:
        """The number of blocks in all tiers."""
        return sum(self.tiers)

    @property
    def resident_bytes(self) -> int:
        """The number of bytes in all tiers."""
        return sum(sum(model.bytes) for model in self.models.values())


@dataclass(frozen=True, slots=True)
class IndexWork:
    """The work that this process has done since it opened the index. Reading it does not contact the store.

    `puts`, `removes`: residencies, one for each (block, tier). `prefix_scans`: lookups of overlaps and children. A clear
    changes none of them. `bytes_written`: 0 for a memory index; for an index in a file, the bytes written to the file; for an
    index in a store, the keys and values of block entries that the server wrote.
    """

    puts: int
    removes: int
    prefix_scans: int
    bytes_written: int
