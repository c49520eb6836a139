"""What the index says of blocks: keys, residencies, and overlaps."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from struct import unpack

from kvatlas.identity import Scope
from kvatlas.tiers import Tier


@dataclass(frozen=True, slots=True)
class BlockKey:
    """One block's full name. Hashes are 16 hex digits of the 64-bit hash, or the caller's own text.

    `prefix_hash` is the parent's block hash; of a first block the session id or "root".
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
    """One block held by one worker in one tier.

    `last_access_ms` and `ref_count` are there only where the engine tells them; `bytes` is 0 where it does not.
    """

    scope: Scope
    sequence_hash: int
    worker_id: str
    tier: Tier
    bytes: int = 0
    last_access_ms: int | None = None
    ref_count: int | None = None
    pinned: bool = False


HOLDER_ENTRY_BYTES = 4
"""A holders value is entries of 4 bytes, sorted: the holder's number (24 bits, big-endian), then its flags byte."""


@dataclass(frozen=True, slots=True)
class ShardRuns:
    """One shard's answer to an overlap: `values[i]` is the holders value of `lengths[i]` consecutive blocks.

    `names` maps the numbers of active holders to their workers; other holders in the values (retired, loading) count
    for nothing.
    """

    values: Sequence[bytes]
    lengths: Sequence[int]
    names: Mapping[int, str]

    def depths(self) -> dict[str, int]:
        """Leading blocks that each active worker holds. Work is per run and per change between runs."""
        depths: dict[str, int] = {}
        alive: set[int] = set()
        position = 0
        for i, (value, length) in enumerate(zip(self.values, self.lengths, strict=True)):
            here = {entry >> 8 for entry in _entries(value)}
            gone = alive - here
            alive = here if i == 0 else alive & here
            for holder in gone:
                if holder in self.names:
                    depths[self.names[holder]] = position
            position += length
        for holder in alive:
            if holder in self.names:
                depths[self.names[holder]] = position
        return depths

    def held(self) -> dict[str, list[tuple[int, int]]]:
        """Every active worker's (length, flags byte) runs from the prompt's start, in one pass over the runs."""
        held: dict[str, list[tuple[int, int]]] = {}
        since: dict[int, tuple[int, int]] = {}  # holder: where its current flags began, and they
        before: frozenset[int] = frozenset()
        position = 0
        for i, (value, length) in enumerate(zip(self.values, self.lengths, strict=True)):
            here = frozenset(_entries(value))
            gone = before - here
            ended = {entry >> 8 for entry in gone}
            if i:  # a holder that comes later does not hold the start: it announces another granularity
                here -= {entry for entry in here - before if entry >> 8 not in ended}
            for holder in ended:
                start, flags = since.pop(holder)
                if holder in self.names:
                    held.setdefault(self.names[holder], []).append((position - start, flags))
            for entry in here - before:
                since[entry >> 8] = (position, entry & 0xFF)
            before = here
            position += length
        for holder, (start, flags) in since.items():
            if holder in self.names:
                held.setdefault(self.names[holder], []).append((position - start, flags))
        return held

    def flags_of(self, worker_id: str) -> list[tuple[int, int]]:
        """(length, flags byte) of each run, as far as the worker holds the prompt."""
        numbers = {number for number, name in self.names.items() if name == worker_id}
        held: list[tuple[int, int]] = []
        for value, length in zip(self.values, self.lengths, strict=True):
            flags = next((entry & 0xFF for entry in _entries(value) if entry >> 8 in numbers), 0)
            if not flags:
                break
            held.append((length, flags))
        return held


def _entries(value: bytes) -> tuple[int, ...]:
    return unpack(f">{len(value) // HOLDER_ENTRY_BYTES}I", value)


@dataclass(frozen=True, slots=True)
class Overlap:
    """Who holds how much of a prompt's start; counts are of looked-up blocks (every granularity-th of the chain).

    Depths are exact, because residency is prefix-closed. The tiers of a run are exact at its first and last block.
    `differences` is filled where verification was asked for: (worker, depth by galloping, depth by a full walk).
    """

    shards: Sequence[ShardRuns]
    looked_up: int
    differences: Sequence[tuple[str, int, int]] = ()

    def depths(self) -> dict[str, int]:
        """Leading looked-up blocks that each worker holds, in any tier; workers that hold none are absent."""
        depths: dict[str, int] = {}
        for shard in self.shards:
            depths.update(shard.depths())  # a worker lives in one shard
        return depths

    def held(self) -> dict[str, list[tuple[int, int]]]:
        """Every worker's (length, flags byte: see `kvatlas.tiers`) runs from the prompt's start; absent: it holds none."""
        held: dict[str, list[tuple[int, int]]] = {}
        for shard in self.shards:
            held.update(shard.held())  # a worker lives in one shard
        return held

    def flags_of(self, worker_id: str) -> list[tuple[int, int]]:
        """(length, flags byte: see `kvatlas.tiers`) of each run, as far as the worker holds the prompt."""
        for shard in self.shards:
            if held := shard.flags_of(worker_id):
                return held
        return []


@dataclass(frozen=True, slots=True)
class IndexMetrics:
    """Counters since the index was opened, and what it holds now.

    `bytes_written` counts key and value bytes of block entries sent to the store.
    """

    resident_blocks: int
    resident_bytes: int
    puts: int
    removes: int
    prefix_scans: int
    bytes_written: int
