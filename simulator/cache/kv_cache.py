"""A paged KV cache: block tables of live sequences over the prefix cache, with prefix sharing and copy-on-write.

Invariants, after every call:

- A block's references equal the number of block tables that it is in; a free block is in no table and has no hash.
- The GPU's cached blocks are prefix-closed. With the CPU tier, so is the union of both, until the GPU alone is reset.
- The events, added up by (hash, medium), are exactly the copies that the cache holds.
- A hit is a block whose tokens and all earlier tokens equal the prompt's, under the same adapter and salt.

Content is modelled by token ids: whatever was written to a block's slots can be read back. Sources: vLLM's block pool and
prefix caching design (full blocks only, tail freed first, duplicates kept, the last prompt token recomputed).
"""

import time
from collections.abc import Callable, Sequence
from itertools import takewhile

from kvatlas.errors import InvalidValue
from kvatlas_simulator.cache.allocation import AllocationRequest, CacheHandle, HandleStats, Priority
from kvatlas_simulator.cache.block_hash import BlockHasher, Namespace, SeededBlockHasher
from kvatlas_simulator.cache.block_pool import BlockPool, PoolSettings
from kvatlas_simulator.cache.block_table import BlockTable, count_blocks
from kvatlas_simulator.cache.cpu_tier import CpuTier
from kvatlas_simulator.cache.errors import (
    InsufficientBlocks,
    SequenceExists,
    SequenceId,
    SequenceNotFound,
    SequenceSwappedOut,
    SequenceTooLong,
)
from kvatlas_simulator.cache.eviction import BuiltInPolicy, EvictionPolicy
from kvatlas_simulator.cache.geometry import KVGeometry
from kvatlas_simulator.cache.kv_events import KVEvent
from kvatlas_simulator.cache.prefix_cache import PrefixCache, PrefixSettings
from kvatlas_simulator.cache.prefix_tree import PrefixNode
from kvatlas_simulator.cache.pressure import MemoryPressure, PressureThresholds
from kvatlas_simulator.cache.sequence_blocks import LiveSequence, PrefixMatch, SequenceBlocks
from kvatlas_simulator.cache.stats import CacheStats, Defragmentation, GarbageCollection


class KVCache:
    """The cache manager of one device: block tables of live sequences over a fixed pool of blocks.

    Synchronous, single-threaded, no I/O. Every method that takes a `sequence_id` raises SequenceNotFound for an unknown one;
    methods that need its blocks raise SequenceSwappedOut. A call that raises changes nothing.

    Deliberate differences:

    - Live sequences are never evicted. If too few blocks are available, the call raises InsufficientBlocks, and its caller
      preempts with `swap_out` or `free`, in its own order or in that of `preemption_order`. The eviction policy orders cached
      blocks that no sequence holds.
    - A freed sequence's full blocks stay cached until their space is needed, or until `gc`.
    - KV is not compressed: that would need a tensor library, and there are no tensors here.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        hasher: BlockHasher | None = None,
        eviction: EvictionPolicy = BuiltInPolicy.LRU,
        num_cpu_blocks: int = 0,
        geometry: KVGeometry | None = None,
        prefixes: PrefixSettings | None = None,
        thresholds: PressureThresholds | None = None,
        on_pressure: Callable[[MemoryPressure, MemoryPressure], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
        report_hits: bool = False,
        pool: PoolSettings | None = None,
    ) -> None:
        """`hasher`: names blocks in events; by default, it is seeded with 0. `pool`: when memory is reserved; by default, all
        of it at the start.

        `on_pressure`: called with the old and the new level, at the end of the call that changed it; it may call the cache, and
        its exceptions reach that call's caller. `clock`: returns the time in seconds, used for the last access and the time to
        live. `report_hits`: record a stored event for each hit on the GPU, like vLLM with `kv_cache_report_mode="full"`.
        """
        if num_blocks < 1 or block_size < 1 or num_cpu_blocks < 0:
            raise InvalidValue(
                f"a cache of {num_blocks} + {num_cpu_blocks} blocks of {block_size} tokens is impossible"
            )
        self.block_size = block_size
        self.num_cpu_blocks = num_cpu_blocks
        self.geometry = geometry or KVGeometry()
        prefixes = prefixes or PrefixSettings()
        self._thresholds = thresholds or PressureThresholds()
        self.on_pressure = on_pressure
        self._clock = clock
        pool = pool or PoolSettings()
        self._pool = BlockPool(num_blocks, pool.initial(num_blocks), pooling=pool.pooling)
        self._prefix_cache = PrefixCache(
            self._pool,
            CpuTier(num_cpu_blocks, eviction),
            hasher=hasher or SeededBlockHasher(0),
            policy=eviction,
            settings=prefixes,
            clock=clock,
            report_hits=report_hits,
        )
        self._blocks = SequenceBlocks(self._pool, self._prefix_cache, block_size)
        self._sequences: dict[SequenceId, LiveSequence] = {}
        self._reported_pressure = MemoryPressure.LOW
        self._hits = self._misses = self._failures = 0
        self._swapped_out = self._swapped_in = 0

    def __contains__(self, sequence_id: object) -> bool:
        """True if a live sequence has this id, even if it is swapped out."""
        return sequence_id in self._sequences

    @property
    def num_blocks(self) -> int:
        return len(self._pool)

    @property
    def capacity_tokens(self) -> int:
        """Number of slots on the GPU, which is the length of the longest sequence that fits."""
        return len(self._pool) * self.block_size

    @property
    def block_bytes(self) -> int:
        return self.geometry.bytes_of(self.block_size)

    @property
    def available_blocks(self) -> int:
        """Number of blocks that no sequence holds."""
        return self._pool.available_blocks

    @property
    def utilisation(self) -> float:
        """Share of the GPU blocks that sequences hold: 0..1."""
        return self._pool.referenced_blocks / len(self._pool)

    @property
    def pressure(self) -> MemoryPressure:
        return self._thresholds.level(self.utilisation)

    @property
    def nodes(self) -> tuple[PrefixNode, ...]:
        """Every block whose content is known; some have no copy."""
        return self._prefix_cache.nodes

    @property
    def sequence_ids(self) -> tuple[SequenceId, ...]:
        """The live sequences, including swapped-out ones."""
        return tuple(self._sequences)

    def stats(self) -> CacheStats:
        """Counters and current gauges. This has to walk over the live sequences and sort the free list."""
        cached = self._prefix_cache
        return CacheStats(
            allocations=self._pool.allocations,
            deallocations=self._pool.deallocations,
            hits=self._hits,
            misses=self._misses,
            evictions=cached.evictions,
            copies=self._blocks.copies,
            failures=self._failures,
            swapped_out=cached.swapped_out + self._swapped_out,
            swapped_in=cached.swapped_in + self._swapped_in,
            cpu_evictions=cached.cpu_evictions,
            utilisation=self.utilisation,
            pressure=self.pressure,
            fragmentation=self._blocks.fragmentation(self._sequences.values()),
            free_fragmentation=self._pool.free_fragmentation(),
            memory_bytes=self._pool.referenced_blocks * self.block_bytes,
            total_memory_bytes=len(self._pool) * self.block_bytes,
            reserved_memory_bytes=self._pool.reserved_blocks * self.block_bytes,
            cached_blocks=cached.cached_blocks,
            cached_prefixes=cached.cached_prefixes,
            cpu_blocks=cached.cpu_blocks,
            swap_blocks=cached.swap_blocks,
        )

    def match(self, token_ids: Sequence[int], namespace: Namespace, earlier: PrefixMatch | None = None) -> PrefixMatch:
        """Find how much of a prompt is cached. The last token never counts, because it must be computed to get an output.

        `earlier`: an older match of the same prompt; any part of it that is still valid is not looked up again.
        """
        lookup_blocks = max(len(token_ids) - 1, 0) // self.block_size
        return self._blocks.match(token_ids, namespace, lookup_blocks, () if earlier is None else earlier.nodes)

    def blocks_required(self, request: AllocationRequest, match: PrefixMatch | None = None) -> int:
        """Number of available blocks that `allocate` takes: for new tokens, and for cached blocks that no sequence holds
        yet."""
        match = match or self.match(request.token_ids, request.namespace)
        return self._blocks.required(match, len(_first_chunk(request, match)))

    def can_allocate(self, request: AllocationRequest, match: PrefixMatch | None = None) -> bool:
        """True if enough blocks are available for `allocate`. `match`: the request's match, if the caller has it."""
        return self.blocks_required(request, match) <= self._pool.available_blocks

    def can_admit(self, request: AllocationRequest, match: PrefixMatch, step_tokens: int) -> bool:
        """True if the whole prompt fits, computed in steps of at most `step_tokens`: an engine begins no other."""
        del step_tokens
        new_tokens = len(request.token_ids) - match.hit_tokens
        return self._blocks.required(match, new_tokens) <= self._pool.available_blocks

    def swap_ins(self, match: PrefixMatch) -> int:
        """Number of cached blocks that `allocate` with this match brings back from the CPU."""
        return sum(1 for node in match.nodes if not node.gpu_block_ids)

    def allocate(
        self, request: AllocationRequest, match: PrefixMatch | None = None, *, count_lookup: bool = True
    ) -> CacheHandle:
        """Begin a sequence with the cached prefix of its prompt, and write its first chunk.

        `match`: the request's match, if the caller has it; it must still be valid. `count_lookup`: whether to count
        hits and misses (they don't count when a preempted sequence comes back). Raises InsufficientBlocks or
        SequenceExists.
        """
        self._check_new(request.sequence_id)
        match = match or self.match(request.token_ids, request.namespace)
        chunk = _first_chunk(request, match)
        self._check_available(self._blocks.required(match, len(chunk)))
        sequence = LiveSequence(request.namespace, request.priority, self._clock(), BlockTable(self.block_size))
        sequence.max_tokens = request.max_tokens
        self._sequences[request.sequence_id] = sequence
        if count_lookup:
            self._hits += len(match.nodes)
            self._misses += match.lookup_blocks - len(match.nodes)
        self._blocks.fill(sequence, match, chunk)
        self._report_pressure()
        return CacheHandle(request.sequence_id, self)

    def can_extend(self, sequence_id: SequenceId, tokens: int) -> bool:
        """True if enough blocks are available to write this many tokens to the sequence."""
        return self._blocks.growth(self._on_gpu(sequence_id), tokens) <= self._pool.available_blocks

    def extend(self, sequence_id: SequenceId, token_ids: Sequence[int]) -> None:
        """Append computed tokens; full blocks are cached immediately. Raises InsufficientBlocks or SequenceTooLong."""
        sequence = self._on_gpu(sequence_id)
        length = sequence.table.length + len(token_ids)
        if sequence.max_tokens is not None and length > sequence.max_tokens:
            raise SequenceTooLong(sequence_id, length, sequence.max_tokens)
        growth = self._blocks.growth(sequence, len(token_ids))
        self._check_available(growth)
        sequence.last_access = self._clock()
        self._blocks.append(sequence, token_ids)
        if growth:
            self._report_pressure()

    def fork(
        self,
        sequence_id: SequenceId,
        new_sequence_id: SequenceId,
        *,
        blocks: int | None = None,
        priority: Priority | None = None,
    ) -> CacheHandle:
        """Begin a sequence that shares the first `blocks` blocks of another (None: all), and has the same priority
        unless another one is given.

        A partial last block is shared too, until either sequence writes to it.
        """
        self._check_new(new_sequence_id)
        source = self._on_gpu(sequence_id)
        count = len(source.table) if blocks is None else blocks
        if not 0 <= count <= len(source.table):
            raise InvalidValue(
                f"sequence {sequence_id} has {len(source.table)} blocks; expected to share at most these, not {count}"
            )
        source.last_access = self._clock()
        table, nodes = self._blocks.share(source, count)
        kept_priority = source.priority if priority is None else priority
        self._sequences[new_sequence_id] = LiveSequence(
            source.namespace, kept_priority, source.last_access, table, nodes, max_tokens=source.max_tokens
        )
        return CacheHandle(new_sequence_id, self)

    def shared_blocks(self, sequence_id: SequenceId, other_sequence_id: SequenceId) -> int:
        """Number of leading physical blocks that two sequences share."""
        pairs = zip(
            self._on_gpu(sequence_id).table.block_ids, self._on_gpu(other_sequence_id).table.block_ids, strict=False
        )
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))

    def exclusive_blocks(self, sequence_id: SequenceId) -> int:
        """Number of blocks that become available if this sequence is freed: those that no other sequence holds."""
        return self._blocks.exclusive(self._on_gpu(sequence_id))

    def free(self, sequence_id: SequenceId) -> None:
        """End a sequence. Its full blocks stay cached until their space is needed."""
        sequence = self._find(sequence_id)
        if sequence.swapped_tokens is None:
            self._blocks.release(sequence)
        else:
            self._prefix_cache.release_swap(count_blocks(len(sequence.swapped_tokens), self.block_size))
        del self._sequences[sequence_id]
        self._report_pressure()

    def swap_out(self, sequence_id: SequenceId) -> int:
        """Copy a live sequence to the CPU and release its GPU blocks. Returns the number of blocks that it takes there.

        The copy is separate from cached blocks, which it may evict from the CPU. Raises InsufficientBlocks if the CPU is
        too small.
        """
        sequence = self._on_gpu(sequence_id)
        token_ids = self._blocks.read(sequence)
        blocks = len(sequence.table)
        try:
            self._prefix_cache.reserve_swap(blocks)
        except InsufficientBlocks:
            self._failures += 1
            raise
        self._swapped_out += blocks
        sequence.swapped_tokens = token_ids
        sequence.last_access = self._clock()
        self._blocks.release(sequence)
        self._report_pressure()
        return blocks

    def swap_in(self, sequence_id: SequenceId) -> int:
        """Bring a sequence back to the GPU. Returns the number of blocks that had to be copied, because they were no longer
        cached anywhere.

        Raises InsufficientBlocks, or InvalidValue if the sequence is not swapped out.
        """
        sequence = self._find(sequence_id)
        token_ids = sequence.swapped_tokens
        if token_ids is None:
            raise InvalidValue(f"sequence {sequence_id} is not swapped out")
        match = self._blocks.match(token_ids, sequence.namespace, len(token_ids) // self.block_size)
        rest = token_ids[match.hit_tokens :]
        self._check_available(self._blocks.required(match, len(rest)))
        sequence.swapped_tokens = None
        sequence.last_access = self._clock()
        # from now on, it is the youngest
        self._sequences[sequence_id] = self._sequences.pop(sequence_id)
        self._prefix_cache.release_swap(count_blocks(len(token_ids), self.block_size))
        self._blocks.fill(sequence, match, rest)
        copied = count_blocks(len(rest), self.block_size)
        self._swapped_in += copied
        self._report_pressure()
        return copied

    def preemption_order(self) -> list[SequenceId]:
        """The sequences that hold blocks, in the order in which they should be preempted: lowest priority first, then
        youngest."""
        holding = [(name, one.priority) for name, one in self._sequences.items() if one.table.block_ids]
        holding.reverse()
        return [name for name, _ in sorted(holding, key=lambda each: each[1])]

    def read(self, sequence_id: SequenceId) -> list[int]:
        """The tokens of a sequence, read through its block table or from the CPU."""
        sequence = self._find(sequence_id)
        sequence.last_access = self._clock()
        return self._blocks.read(sequence)

    def block_table(self, sequence_id: SequenceId) -> BlockTable:
        """A copy of a sequence's block table; empty while it is swapped out."""
        table = self._find(sequence_id).table
        return table.head(len(table))

    def handle(self, sequence_id: SequenceId) -> CacheHandle:
        """The handle of a live sequence, as `allocate` and `fork` return it."""
        self._find(sequence_id)
        return CacheHandle(sequence_id, self)

    def handle_stats(self, sequence_id: SequenceId) -> HandleStats:
        """One sequence's memory now."""
        sequence = self._find(sequence_id)
        blocks = len(sequence.table)
        return HandleStats(
            memory_bytes=blocks * self.block_bytes,
            blocks=blocks,
            tokens=sequence.table.length if sequence.swapped_tokens is None else len(sequence.swapped_tokens),
            utilisation=sequence.table.length / (blocks * self.block_size) if blocks else 0.0,
            last_access=sequence.last_access,
        )

    def request_of(self, sequence_id: SequenceId) -> AllocationRequest:
        """A request that would allocate the sequence as it is now, in this cache or another one."""
        sequence = self._on_gpu(sequence_id)
        tokens = self._blocks.read(sequence)
        return AllocationRequest(
            sequence_id, tokens, sequence.namespace, sequence.priority, max_tokens=sequence.max_tokens
        )

    def gc(self, *, keep_blocks: int | None = None) -> GarbageCollection:
        """Drop expired prefixes, then evict until at most `keep_blocks` cached blocks are left that no sequence holds.

        None evicts nothing, 0 everything that is not held. Evicted blocks go to the CPU tier as usual.
        """
        if keep_blocks is not None and keep_blocks < 0:
            raise InvalidValue(f"keep_blocks is {keep_blocks}; expected at least 0")
        began_s, cached = time.perf_counter(), self._prefix_cache
        blocks, prefixes = self._pool.free_blocks, cached.cached_prefixes
        cached.drop_expired()
        if keep_blocks is not None:
            cached.evict_down_to(keep_blocks)
        freed = self._pool.free_blocks - blocks
        time_ms = (time.perf_counter() - began_s) * 1e3
        return GarbageCollection(freed, freed * self.block_bytes, prefixes - cached.cached_prefixes, time_ms)

    def set_prefixes(self, prefixes: PrefixSettings) -> None:
        """From now on, cache prefixes under these settings. Cached blocks stay, and are found again once `sharing` is on
        again. Blocks of live sequences that filled up in the meantime are cached when the sequence is extended."""
        self._prefix_cache.settings = prefixes
        self._prefix_cache.limit_prefixes()

    def defragment(self) -> Defragmentation:
        """Move blocks so that all free ones are adjacent. Sequences keep their content in new physical blocks."""
        before = self._pool.free_fragmentation()
        moves = self._prefix_cache.compact()
        for sequence in self._sequences.values():
            ids = sequence.table.block_ids
            ids[:] = [moves.get(block_id, block_id) for block_id in ids]
        return Defragmentation(len(moves), before, self._pool.free_fragmentation())

    def reset(self, *, include_cpu: bool = False) -> bool:
        """Drop every cached block of the GPU, and of the CPU if requested. Returns False and changes nothing if a sequence
        holds any of them."""
        if self._pool.referenced_blocks:
            return False
        self._prefix_cache.clear(include_cpu=include_cpu)
        return True

    def take_events(self) -> tuple[KVEvent, ...]:
        """The events since the last call, in order."""
        return self._prefix_cache.take_events()

    def _find(self, sequence_id: SequenceId) -> LiveSequence:
        try:
            return self._sequences[sequence_id]
        except KeyError:
            raise SequenceNotFound(sequence_id) from None

    def _on_gpu(self, sequence_id: SequenceId) -> LiveSequence:
        sequence = self._find(sequence_id)
        if sequence.swapped_tokens is not None:
            raise SequenceSwappedOut(sequence_id)
        return sequence

    def _check_new(self, sequence_id: SequenceId) -> None:
        if sequence_id in self._sequences:
            raise SequenceExists(sequence_id)

    def _check_available(self, blocks: int) -> None:
        if blocks > self._pool.available_blocks:
            self._failures += 1
            raise InsufficientBlocks(blocks, self._pool.available_blocks)

    def _report_pressure(self) -> None:
        """Call the callback if the level has changed. This must be the last thing that a call does."""
        before, now = self._reported_pressure, self.pressure
        if now is not before:
            self._reported_pressure = now
            if self.on_pressure is not None:
                self.on_pressure(before, now)


def _first_chunk(request: AllocationRequest, match: PrefixMatch) -> Sequence[int]:
    """The tokens that `allocate` writes after the match."""
    end = None if request.first_chunk is None else match.hit_tokens + request.first_chunk
    return request.token_ids[match.hit_tokens : end]
