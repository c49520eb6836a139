"""The cache manager of a hybrid model's engine: the counterpart of `KVCache` for several kinds of attention.

Invariants, after every call:

- A block's references equal the number of tables that it is in, over all groups; a free block may still have content.
- The events, added up by (hash, group), are exactly the copies that the cache holds.
- A hit ends at the deepest position, before the prompt's last token, at which every group has the blocks that it needs.

Sources: vLLM 0.33's hybrid coordinator, block pool and retention of sparse groups. Simplifications: all groups have the
same block size, there is no CPU tier, and a step does not have to end where a mamba state is kept.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvatlas.blocks.kv_cache_groups import AttentionKind
from kvatlas.errors import InvalidValue
from kvatlas_simulator.cache.allocation import AllocationRequest
from kvatlas_simulator.cache.block_hash import BlockHasher, Namespace, SeededBlockHasher
from kvatlas_simulator.cache.block_table import count_blocks
from kvatlas_simulator.cache.errors import InsufficientBlocks, SequenceExists, SequenceId, SequenceNotFound
from kvatlas_simulator.cache.geometry import KVGeometry
from kvatlas_simulator.cache.kv_events import BlocksStored, KVEvent, Medium
from kvatlas_simulator.cache.pressure import MemoryPressure, PressureThresholds
from kvatlas_simulator.cache.sequence_blocks import PrefixMatch
from kvatlas_simulator.cache.stats import CacheStats
from kvatlas_simulator.hybrid_cache.block_pool import Block, Content, SharedBlockPool
from kvatlas_simulator.hybrid_cache.groups import CacheGroup, Retention


@dataclass(slots=True)
class _Sequence:
    """A live sequence: its tokens in the cache, its full blocks' hashes, and each group's blocks by index.

    `ends`: positions, in tokens, that sparse groups keep for other requests.
    """

    namespace: Namespace
    ends: tuple[int, ...]
    tables: list[dict[int, Block]]
    tokens: list[int] = field(default_factory=list)
    hashes: list[int] = field(default_factory=list)


class HybridCache:
    """One pool of blocks for several groups. Its calls and errors are those of `KVCache`; it frees in vLLM's order
    (LRU)."""

    num_cpu_blocks = 0

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        *,
        num_blocks: int,
        block_size: int,
        retention: Retention | None = None,
        hasher: BlockHasher | None = None,
    ) -> None:
        """Raises InvalidValue for groups or sizes that no engine has."""
        if num_blocks < len(groups) or block_size < 1:
            raise InvalidValue(f"a cache of {num_blocks} blocks of {block_size} tokens is impossible")
        if sum(group.is_full for group in groups) != 1:
            raise InvalidValue(f"{len(groups)} groups; expected exactly one of full attention among them")
        if any(group.kind is AttentionKind.CHUNKED_LOCAL and group.tokens % block_size for group in groups):
            raise InvalidValue(f"expected chunks of a multiple of the block size, {block_size} tokens")
        retention = retention or Retention()
        if retention.interval % block_size:
            raise InvalidValue(
                f"retention interval {retention.interval}; expected a multiple of the block size {block_size}, or 0"
            )
        self.groups = tuple(groups)
        self.block_size = block_size
        self._retention = retention
        self.full_group = next(i for i, group in enumerate(groups) if group.is_full)
        self._pool = SharedBlockPool(num_blocks)
        self._hasher = hasher or SeededBlockHasher(0)
        self._sequences: dict[SequenceId, _Sequence] = {}
        self._thresholds = PressureThresholds()
        self._hits = self._misses = self._copies = self._failures = 0

    @property
    def num_blocks(self) -> int:
        return len(self._pool)

    @property
    def capacity_tokens(self) -> int:
        """The longest sequence that fits, in however many steps: each group may hold a block for each part of it."""
        return len(self._pool) // len(self.groups) * self.block_size

    @property
    def available_blocks(self) -> int:
        """Number of blocks that no sequence holds."""
        return self._pool.available_blocks

    @property
    def utilisation(self) -> float:
        """Share of the blocks that sequences hold: 0..1."""
        return 1 - self._pool.available_blocks / len(self._pool)

    @property
    def pressure(self) -> MemoryPressure:
        return self._thresholds.level(self.utilisation)

    @property
    def contents(self) -> tuple[Content, ...]:
        """All cached blocks; each has a copy in at least one group."""
        return tuple(self._pool.contents.values())

    def stats(self) -> CacheStats:
        """Counters and current gauges."""
        referenced = len(self._pool) - self._pool.available_blocks
        block_bytes = KVGeometry().bytes_of(self.block_size)
        return CacheStats(
            allocations=self._pool.allocations,
            deallocations=self._pool.allocations - referenced - self._pool.cached_blocks,
            hits=self._hits,
            misses=self._misses,
            evictions=self._pool.evictions,
            copies=self._copies,
            failures=self._failures,
            swapped_out=0,
            swapped_in=0,
            cpu_evictions=0,
            utilisation=self.utilisation,
            pressure=self.pressure,
            fragmentation=0.0,
            free_fragmentation=0.0,
            memory_bytes=referenced * block_bytes,
            total_memory_bytes=len(self._pool) * block_bytes,
            reserved_memory_bytes=len(self._pool) * block_bytes,
            cached_blocks=self._pool.cached_blocks,
            cached_prefixes=0,
            cpu_blocks=0,
            swap_blocks=0,
        )

    def match(self, token_ids: Sequence[int], namespace: Namespace, earlier: PrefixMatch | None = None) -> PrefixMatch:
        """Find how much of a prompt can be reused. `earlier` is ignored."""
        del earlier
        lookup_blocks = max(len(token_ids) - 1, 0) // self.block_size
        hit, _ = self._deepest(self._known(token_ids, namespace, lookup_blocks))
        return PrefixMatch(len(token_ids), namespace, (), hit * self.block_size, lookup_blocks)

    def resumable_once_computed(self, token_ids: Sequence[int], namespace: Namespace, blocks: int) -> int:
        """The deepest of a prompt's first `blocks` positions at which another prompt can resume once this one is
        computed."""
        sequence, known, _ = self._begin(AllocationRequest("", token_ids, namespace))
        size, end = self.block_size, len(token_ids) // self.block_size
        kept: list[set[int]] = []
        for number, group in enumerate(self.groups):
            computed = self._retention.kept(group, 0, end, sequence.ends, size)
            kept.append({*computed, *(index for index, content in enumerate(known) if content.copies[number])})
        return next(
            (
                at
                for at in range(min(blocks, end), 0, -1)
                if all(
                    indices.issuperset(range(group.first_needed(at * size, size), at))
                    for group, indices in zip(self.groups, kept, strict=True)
                )
            ),
            0,
        )

    def swap_ins(self, match: PrefixMatch) -> int:
        """0: there is no CPU tier."""
        del match
        return 0

    def can_allocate(self, request: AllocationRequest, match: PrefixMatch | None = None) -> bool:
        """True if enough blocks are available for `allocate`. The match is computed again."""
        return self._required(request) <= self._pool.available_blocks

    def can_admit(self, request: AllocationRequest, match: PrefixMatch, step_tokens: int) -> bool:
        """True if the whole prompt fits, computed in steps of at most `step_tokens`. Groups that give blocks back during a
        prompt need fewer than its length (vLLM's `max_admission_blocks_per_request`)."""
        sequence, known, hit = self._begin(request)
        size, whole = self.block_size, len(request.token_ids)
        chunk_blocks = whole_blocks = reused_blocks = 0
        for number, group in enumerate(self.groups):
            reused_blocks += self._taken_by_reuse(known, number, hit)
            chunk = len(self._new_indices(sequence, number, hit * size, self._first_end(request, hit)))
            chunk_blocks += chunk
            most = chunk if group.kind is AttentionKind.MAMBA else group.most_blocks(whole, step_tokens, size) - hit
            whole_blocks += max(0, most)
        return reused_blocks + max(chunk_blocks, whole_blocks) <= self._pool.available_blocks

    def allocate(
        self, request: AllocationRequest, match: PrefixMatch | None = None, *, count_lookup: bool = True
    ) -> None:
        """Begin a sequence at the position where its prompt can resume, and write its first chunk.

        Raises InsufficientBlocks or SequenceExists.
        """
        if request.sequence_id in self._sequences:
            raise SequenceExists(request.sequence_id)
        self._check_available(self._required(request))
        sequence, known, hit = self._begin(request)
        size = self.block_size
        if count_lookup:
            self._hits += hit
            self._misses += max(len(request.token_ids) - 1, 0) // size - hit
        for number, group in enumerate(self.groups):
            for index in range(group.first_needed(hit * size, size), hit):
                sequence.tables[number][index] = self._pool.hold(known[index], number)
        sequence.tokens = list(request.token_ids[: hit * size])
        sequence.hashes = [content.block_hash for content in known[:hit]]
        self._sequences[request.sequence_id] = sequence
        self._write(sequence, request.token_ids[hit * size : self._first_end(request, hit)])

    def can_extend(self, sequence_id: SequenceId, tokens: int) -> bool:
        """True if enough blocks are available to write this many tokens to the sequence."""
        return self._growth(self._find(sequence_id), tokens) <= self._pool.available_blocks

    def extend(self, sequence_id: SequenceId, token_ids: Sequence[int]) -> None:
        """Append computed tokens. Raises InsufficientBlocks."""
        sequence = self._find(sequence_id)
        self._check_available(self._growth(sequence, len(token_ids)))
        self._write(sequence, token_ids)

    def fork(self, sequence_id: SequenceId, new_sequence_id: SequenceId) -> None:
        """Begin a sequence that shares all blocks of another; partial blocks are shared until either sequence writes to
        them."""
        if new_sequence_id in self._sequences:
            raise SequenceExists(new_sequence_id)
        source = self._find(sequence_id)
        for table in source.tables:
            for block in table.values():
                self._pool.hold_again(block)
        self._sequences[new_sequence_id] = _Sequence(
            source.namespace,
            source.ends,
            [dict(table) for table in source.tables],
            list(source.tokens),
            list(source.hashes),
        )

    def free(self, sequence_id: SequenceId) -> None:
        """End a sequence. Blocks that its groups keep stay cached until their space is needed; the tail is evicted first."""
        sequence = self._find(sequence_id)
        for table in sequence.tables:
            for index in sorted(table, reverse=True):
                self._pool.release(table[index])
        del self._sequences[sequence_id]

    def reset(self, *, include_cpu: bool = False) -> bool:
        """Drop every cached block. Returns False and changes nothing if a sequence holds any."""
        del include_cpu
        if self._pool.available_blocks < len(self._pool):
            return False
        self._pool.clear()
        return True

    def take_events(self) -> tuple[KVEvent, ...]:
        """The events since the last call, in order."""
        events = tuple(self._pool.events)
        self._pool.events.clear()
        return events

    def allows(self, position: int, runs: Sequence[int]) -> bool:
        """True if a prompt can resume after `position` blocks. `runs`: the number of consecutive blocks up to that position
        that each group holds."""
        tokens = position * self.block_size
        return all(
            run >= position - group.first_needed(tokens, self.block_size)
            for group, run in zip(self.groups, runs, strict=True)
        )

    def is_resident(self, content: Content) -> bool:
        """True if full attention holds the block."""
        return bool(content.copies[self.full_group])

    def _find(self, sequence_id: SequenceId) -> _Sequence:
        try:
            return self._sequences[sequence_id]
        except KeyError:
            raise SequenceNotFound(sequence_id) from None

    def _check_available(self, blocks: int) -> None:
        if blocks > self._pool.available_blocks:
            self._failures += 1
            raise InsufficientBlocks(blocks, self._pool.available_blocks)

    def _known(self, token_ids: Sequence[int], namespace: Namespace, blocks: int) -> list[Content]:
        """The prompt's leading blocks that are held by at least one group."""
        size, found = self.block_size, list[Content]()
        above: int | None = None
        for index in range(blocks):
            tokens = token_ids[index * size : (index + 1) * size]
            content = self._pool.contents.get(self._hasher(above, tokens, namespace))
            if content is None or not content.equals(above, tokens, namespace):
                break
            found.append(content)
            above = content.block_hash
        return found

    def _deepest(self, known: Sequence[Content]) -> tuple[int, int]:
        """The deepest position that every group allows, and the number of blocks that full attention holds; in blocks."""
        runs: list[tuple[int, ...]] = []
        before = (0,) * len(self.groups)
        for content in known:
            before = extend_runs(before, content)
            runs.append(before)
        resident = next((at for at, each in enumerate(runs) if each[self.full_group] != at + 1), len(known))
        deepest = next((at for at in range(resident, 0, -1) if self.allows(at, runs[at - 1])), 0)
        return deepest, resident

    def _begin(self, request: AllocationRequest) -> tuple[_Sequence, list[Content], int]:
        """Create an empty sequence. Returns it, the known blocks of its prompt, and how many of them are reused."""
        last = max(len(request.token_ids) - 1, 0)
        known = self._known(request.token_ids, request.namespace, last // self.block_size)
        hit, resident = self._deepest(known)
        ends = (last, resident * self.block_size) if resident > hit else (last,)
        return _Sequence(request.namespace, ends, [{} for _ in self.groups]), known, hit

    def _first_end(self, request: AllocationRequest, hit: int) -> int:
        """The end of the first chunk, in tokens."""
        whole = len(request.token_ids)
        return whole if request.first_chunk is None else min(whole, hit * self.block_size + request.first_chunk)

    def _required(self, request: AllocationRequest) -> int:
        """Number of available blocks that `allocate` takes: reused ones that no sequence holds, and new ones."""
        sequence, known, hit = self._begin(request)
        size, end = self.block_size, self._first_end(request, hit)
        taken = 0
        for number in range(len(self.groups)):
            taken += self._taken_by_reuse(known, number, hit)
            taken += len(self._new_indices(sequence, number, hit * size, end))
        return taken

    def _taken_by_reuse(self, known: Sequence[Content], number: int, hit: int) -> int:
        """Available blocks that a group takes to resume after `hit` blocks: those that no sequence holds yet."""
        first = self.groups[number].first_needed(hit * self.block_size, self.block_size)
        return sum(self._pool.is_free(known[index], number) for index in range(first, hit))

    def _growth(self, sequence: _Sequence, tokens: int) -> int:
        """Number of available blocks that `_write` takes."""
        length = len(sequence.tokens)
        new = sum(
            len(self._new_indices(sequence, number, length, length + tokens)) for number in range(len(self.groups))
        )
        return new + len(self._shared_tails(sequence, tokens))

    def _new_indices(self, sequence: _Sequence, number: int, start: int, end: int) -> list[int]:
        """The blocks that a group needs for writing the tokens from `start` to `end`."""
        size, group = self.block_size, self.groups[number]
        last = count_blocks(end, size)
        if group.kind is not AttentionKind.MAMBA:
            return list(range(count_blocks(start, size), last))
        # its running state, and a copy of it at each kept position
        found = self._states(sequence, group, start, end)
        if last:
            found.add(last - 1)
        return sorted(found - sequence.tables[number].keys())

    def _states(self, sequence: _Sequence, group: CacheGroup, start: int, end: int) -> set[int]:
        """The blocks at whose ends a mamba group keeps its state: at the ends of steps, of prompts and of shared parts."""
        size = self.block_size
        kept = self._retention.kept(group, start // size, end // size, sequence.ends, size)
        ends = {position // size - 1 for position in (*sequence.ends, end)}
        return ends.intersection(kept)

    def _shared_tails(self, sequence: _Sequence, tokens: int) -> list[int]:
        """The groups whose partial last block another sequence also holds, if tokens are written to it."""
        length = len(sequence.tokens)
        if not tokens or not length % self.block_size:
            return []
        tail = length // self.block_size
        return [number for number, table in enumerate(sequence.tables) if table[tail].references > 1]

    def _write(self, sequence: _Sequence, token_ids: Sequence[int]) -> None:
        size, start = self.block_size, len(sequence.tokens)
        end = start + len(token_ids)
        for number in self._shared_tails(sequence, len(token_ids)):
            table = sequence.tables[number]
            copy = self._pool.take(number)
            self._pool.release(table[start // size])
            table[start // size] = copy
            self._copies += 1
        # all blocks are taken before any is cached, so that removals come before stores, as in vLLM
        for number, table in enumerate(sequence.tables):
            for index in self._new_indices(sequence, number, start, end):
                table[index] = self._pool.take(number)
        sequence.tokens.extend(token_ids)
        self._hash(sequence)
        for number, group in enumerate(self.groups):
            kept = self._retention.kept(group, start // size, end // size, sequence.ends, size)
            self._cache(sequence, number, start // size, end // size, kept)
            self._release_unneeded(sequence, number, group.first_needed(end, size))

    def _hash(self, sequence: _Sequence) -> None:
        size, hashes = self.block_size, sequence.hashes
        for index in range(len(hashes), len(sequence.tokens) // size):
            tokens = sequence.tokens[index * size : (index + 1) * size]
            hashes.append(self._hasher(hashes[-1] if hashes else None, tokens, sequence.namespace))

    def _cache(self, sequence: _Sequence, number: int, start: int, end: int, kept: Sequence[int]) -> None:
        """Cache the blocks `kept` among the full ones from `start` to `end`, and record events. A block whose hash is that of
        another block is not cached."""
        if start == end:
            return
        size, table = self.block_size, sequence.tables[number]
        stored: list[int] = []
        for index in kept:
            block = table.get(index)
            if block is None or block.content is not None:  # skipped by a mamba group, or shared with a fork
                continue
            name, above = sequence.hashes[index], sequence.hashes[index - 1] if index else None
            tokens = tuple(sequence.tokens[index * size : (index + 1) * size])
            content = self._pool.contents.get(name) or Content(
                name, above, tokens, sequence.namespace, len(self.groups)
            )
            if content.equals(above, tokens, sequence.namespace):
                self._pool.cache(block, content)
                stored.append(index)
        self._pool.events.append(
            BlocksStored(
                block_hashes=tuple(sequence.hashes[index] for index in stored),
                parent_hash=sequence.hashes[start - 1] if start else None,
                token_ids=tuple(sequence.tokens[start * size : end * size]),
                medium=Medium.GPU,
                adapter=sequence.namespace.adapter,
                extra_keys=tuple(sequence.namespace.extra_keys(first=not index) for index in stored),
                group=number,
            )
        )

    def _release_unneeded(self, sequence: _Sequence, number: int, first_needed: int) -> None:
        table = sequence.tables[number]
        for index in sorted((index for index in table if index < first_needed), reverse=True):
            self._pool.release(table.pop(index))


def extend_runs(runs: Sequence[int], content: Content) -> tuple[int, ...]:
    """The number of consecutive blocks up to this one that each group holds, computed from the counts at the previous
    block."""
    return tuple(run + 1 if copies else 0 for run, copies in zip(runs, content.copies, strict=True))
