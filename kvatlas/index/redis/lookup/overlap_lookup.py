"""The overlap of a chain with what the shards hold: one call to each shard, and further calls for whatever a call leaves over,
because the work of one call is bounded."""

from collections.abc import Sequence
from typing import Any

from kvatlas.blocks.hashing import HASH_BYTES
from kvatlas.blocks.residency import Overlap, ShardRuns, depths_by_holder
from kvatlas.index.gallop import STRIDE, differences
from kvatlas.index.holder_entries import depths_by_number
from kvatlas.index.mark_lookup import MarkedHolder, walk_positions
from kvatlas.index.redis.index_functions import IndexFunctions
from kvatlas.index.redis.lookup.holder_names import HolderNames
from kvatlas.index.redis.records import OverlapAnswer, pack_reach, unpack_reach
from kvatlas.index.redis.shard_reader import ShardReader
from kvatlas.index.run_guesses import MOST_STARTS, RunGuesses

MOST_LOOKED_UP = 196_608
"""Maximum number of a chain's blocks that a lookup looks at: 3 million tokens in blocks of 16. A longer argument would hold up
the store."""

_NAME_TRIES = 3


class OverlapLookup:
    """Looks up chains in all shards of one index. It remembers the names of holders, and where runs ended the last time."""

    def __init__(self, functions: IndexFunctions, readers: Sequence[ShardReader]) -> None:
        self._functions = functions
        self._readers = readers
        self._names = [HolderNames(reader.keys) for reader in readers]
        self._guesses = [RunGuesses(MOST_STARTS // len(readers)) for _ in readers]

    async def overlap(self, scope_id: bytes, hashes: bytes, reach: tuple[int, int], *, verify: bool) -> Overlap:
        """`reach`: the index of the first block, and the highest position to find (see `check_reach`). `verify`: also look at
        every block, and return the differences."""
        found = await self._look_up(scope_id, hashes, STRIDE, reach)
        if not verify:
            return found
        walked = await self._look_up(scope_id, hashes, 0, reach)
        shards = [
            await self._walk_marks(reader, scope_id, hashes, reach, shard) if shard.positions else shard
            for reader, shard in zip(self._readers, walked.shards, strict=True)
        ]
        return Overlap(found.shards, found.looked_up, differences(found, Overlap(shards, walked.looked_up)))

    async def _look_up(self, scope_id: bytes, hashes: bytes, stride: int, reach: tuple[int, int]) -> Overlap:
        args = [hashes[: MOST_LOOKED_UP * HASH_BYTES], stride, *reach]
        guesses = [guesses.find(hashes) if stride else b"" for guesses in self._guesses]
        calls = [
            ([k.blocks(scope_id), k.meta, k.marked, k.marks(scope_id)], [*args, guess])
            for k, guess in zip((reader.keys for reader in self._readers), guesses, strict=True)
        ]
        for attempt in range(_NAME_TRIES):
            answers = await self._functions.call_ro_many("kvatlas_overlap", calls)
            shards = []
            for names, (keys, _), answer in zip(self._names, calls, answers, strict=True):
                version = answer[0]
                if names.version != version:
                    await names.read(self._functions)
                if names.version == version or attempt == _NAME_TRIES - 1:
                    values, lengths, positions = await self._complete(keys, args, OverlapAnswer(*answer))
                    shards.append(ShardRuns(values, lengths, names.at(version), positions))
            if len(shards) == len(self._readers):
                break
        if stride:
            for known, shard, guess in zip(self._guesses, shards, guesses, strict=True):
                known.keep(hashes, shard.lengths, guess)
        return Overlap(shards, len(hashes) // HASH_BYTES)

    async def _complete(
        self, keys: Sequence[str], args: Sequence[Any], answer: OverlapAnswer
    ) -> tuple[Sequence[bytes], Sequence[int], dict[int, int]]:
        """The values, their lengths, and each marked holder's position. A call does a bounded amount of work, and may leave the
        rest to the next call."""
        hashes, stride, first_index, limit = args
        values, lengths, at = answer.values, answer.lengths, answer.next
        while at:
            more = OverlapAnswer(
                *await self._functions.call_ro("kvatlas_overlap", keys, [hashes[at * HASH_BYTES :], stride, "", 0])
            )
            if more.values and more.values[0] == values[-1]:
                lengths = [*lengths[:-1], lengths[-1] + more.lengths[0], *more.lengths[1:]]
                values = [*values, *more.values[1:]]
            else:
                values, lengths = [*values, *more.values], [*lengths, *more.lengths]
            at = at + more.next if more.next else 0
        found = unpack_reach(answer.reach)
        left = answer.left
        if left:
            depths = depths_by_holder(values, lengths)
            left = pack_reach(
                {number: min(below, first_index + depths[number]) for number, below in unpack_reach(left).items()}
            )
        while left:
            packed, left = await self._functions.call_ro("kvatlas_resume", keys[2:], [hashes, first_index, limit, left])
            found |= unpack_reach(packed)
        return values, lengths, found

    async def _walk_marks(
        self, reader: ShardReader, scope_id: bytes, hashes: bytes, reach: tuple[int, int], runs: ShardRuns
    ) -> ShardRuns:
        """The runs, with the positions of marked holders that were found by looking at the marks of every block."""
        first_index, limit = reach
        dropped, depths = await reader.dropped(), depths_by_number(runs.values, runs.lengths)
        holders = {number: MarkedHolder(depths[number], dropped[number]) for number in depths if number in dropped}
        marks = await reader.marks(scope_id, hashes)
        found = walk_positions(marks.get, hashes, holders, limit, first_index)
        return runs._replace(positions={int.from_bytes(n, "big"): found.get(n, 0) for n in holders})
