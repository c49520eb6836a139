"""Overlap by galloping: exact from a few probes, because residency is prefix-closed.

Along a chain, active holders can only disappear. Equal values at two places therefore mean that the active holders between them
are equal too, and a block without a holder ends the overlap. The twin of this file in Lua is `redis/functions/overlap.lua`.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import pairwise
from struct import Struct, iter_unpack
from typing import NamedTuple

from kvatlas.blocks.hashing import HASH_BYTES
from kvatlas.blocks.residency import Overlap

STRIDE = 64

Runs = tuple[Sequence[bytes], Sequence[int]]
"""(holders values, run lengths)."""


def gallop(get: Callable[[bytes], bytes | None], hashes: bytes, stride: int = STRIDE, guess: bytes = b"") -> Runs:
    """Runs of equal holders over packed hashes; `get` returns the holders value of a block, None if it has no holder.

    Probes the places where runs are likely to begin and end (`guess`, see `RunGuesses`), then every `stride` blocks, and
    bisects only between probes that differ.
    """
    first = get(hashes[:HASH_BYTES])
    if first is None:
        return (), ()
    count = len(hashes) // HASH_BYTES
    probes = _probes(count, stride, guess)
    probed = list(map(get, probes.struct.unpack_from(hashes)))
    probed.append(get(hashes[-HASH_BYTES:]))
    if probed.count(first) == len(probed):
        return (first,), (count,)
    values: list[bytes] = [first]
    starts = [0]
    left = 0
    left_value: bytes | None = first
    for right, right_value in zip(probes.places, probed, strict=True):
        if right_value is not left_value and right_value != left_value:
            if right_value is not None and right == left + 1:
                starts.append(right)
                values.append(right_value)
            else:
                stop = _bisect(get, hashes, left, left_value, right, right_value, starts, values)
                if stop is not None:
                    return _to_runs(values, starts, stop)
        left, left_value = right, right_value
    return _to_runs(values, starts, count)


class _Probes(NamedTuple):
    """`struct` unpacks the hashes at all `places` except the last, which is the last block."""

    places: tuple[int, ...]
    struct: Struct


@lru_cache(maxsize=1_024)
def _probes(count: int, stride: int, guess: bytes) -> _Probes:
    """The places to probe among `count` packed hashes after the first."""
    guessed = [place for (place,) in iter_unpack(">I", guess)]
    places = [place for place in guessed if 0 < place < count - 1]
    places += range(max(guessed, default=0) + stride, count - 1, stride)
    gaps = (right - left - 1 for left, right in pairwise((0, *places)))
    layout = "".join(f"{gap * HASH_BYTES}x{HASH_BYTES}s" for gap in gaps)
    return _Probes((*places, count - 1), Struct(f"{HASH_BYTES}x{layout}" if places else ""))


def walk(get: Callable[[bytes], bytes | None], hashes: bytes) -> Runs:
    """The same runs as `gallop` returns, found by reading every block."""
    count = len(hashes) // HASH_BYTES
    values: list[bytes] = []
    starts: list[int] = []
    for i in range(count):
        value = get(hashes[i * HASH_BYTES : (i + 1) * HASH_BYTES])
        if value is None:
            return _to_runs(values, starts, i)
        if not values or value != values[-1]:
            values.append(value)
            starts.append(i)
    return _to_runs(values, starts, count)


def _bisect(
    get: Callable[[bytes], bytes | None],
    hashes: bytes,
    left: int,
    left_value: bytes | None,
    right: int,
    right_value: bytes | None,
    starts: list[int],
    values: list[bytes],
) -> int | None:
    """Append the runs that start in (left, right], in order. Returns the first block without a holder, if it lies in that
    range."""
    open_intervals = [(left, left_value, right, right_value)]
    while open_intervals:
        low, low_value, high, high_value = open_intervals.pop()
        if low_value == high_value:
            continue
        if high == low + 1:
            if high_value is None:
                return high
            starts.append(high)
            values.append(high_value)
            continue
        middle = (low + high) // 2
        middle_value = get(hashes[middle * HASH_BYTES : (middle + 1) * HASH_BYTES])
        if middle_value is not None:
            open_intervals.append((middle, middle_value, high, high_value))
        open_intervals.append((low, low_value, middle, middle_value))
    return None


def _to_runs(values: list[bytes], starts: list[int], stop: int) -> Runs:
    ends = [*starts[1:], stop] if starts else []
    return values, [end - start for start, end in zip(starts, ends, strict=True)]


def differences(galloped: Overlap, walked: Overlap) -> Sequence[tuple[str, int, int]]:
    """(worker, depth by galloping, depth by a walk) for every worker whose two depths differ, sorted; then the same for how far
    workers with marks can resume the chain."""
    return tuple(
        (worker, fast.get(worker, 0), slow.get(worker, 0))
        for fast, slow in ((galloped.depths(), walked.depths()), (galloped.reach(), walked.reach()))
        for worker in sorted(fast.keys() | slow.keys())
        if fast.get(worker, 0) != slow.get(worker, 0)
    )
