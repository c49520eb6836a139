"""Galloping equals a full walk for every prefix-closed state, whatever entries of retired and loading holders are left
over."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvatlas.blocks.hashing import pack_hashes
from kvatlas.blocks.residency import ShardRuns
from kvatlas.blocks.tiers import Tier
from kvatlas.index.gallop import gallop, walk
from kvatlas.index.holder_entries import number_bytes, with_entry

ACTIVE = {number: f"w{number}" for number in range(1, 9)}

PACKED = pack_hashes(range(1, 513))
KEYS = [PACKED[i : i + 8] for i in range(0, len(PACKED), 8)]

depths = st.dictionaries(st.sampled_from(sorted(ACTIVE)), st.integers(0, 400), max_size=8)
leftovers = st.lists(st.tuples(st.integers(0, 399), st.integers(100, 104)), max_size=12)


def values(depth_of: dict[int, int], leftover: list[tuple[int, int]], count: int) -> list[bytes | None]:
    """The holders value of each block: active holders up to their depth, other holders anywhere."""
    out: list[bytes | None] = []
    for i in range(count):
        value = b""
        for number, depth in depth_of.items():
            if i < depth:
                value = with_entry(value, number_bytes(number), Tier.HBM.flag)
        for at, number in leftover:
            if at == i:
                value = with_entry(value, number_bytes(number), Tier.HBM.flag)
        out.append(value or None)
    return out


guesses = st.lists(st.integers(0, 600), max_size=20, unique=True).map(sorted)


@given(depths, leftovers, st.integers(0, 400), st.sampled_from([1, 3, 64]), guesses)
def test_gallop_equals_walk(
    depth_of: dict[int, int], leftover: list[tuple[int, int]], count: int, stride: int, guess: list[int]
) -> None:
    get = dict(zip(KEYS, values(depth_of, leftover, count), strict=False)).get
    packed_guess = b"".join(place.to_bytes(4, "big") for place in guess)
    fast = ShardRuns(*gallop(get, PACKED[: 8 * count], stride, packed_guess), ACTIVE)
    slow = ShardRuns(*walk(get, PACKED[: 8 * count]), ACTIVE)
    expected = {ACTIVE[number]: min(depth, count) for number, depth in depth_of.items() if min(depth, count)}
    assert fast.depths() == slow.depths() == expected


@pytest.mark.parametrize(("holders", "most"), [(1, 15), (4, 45)])
def test_gallop_reads_few_blocks(holders: int, most: int) -> None:
    read: list[bytes] = []
    table = dict(
        zip(KEYS, values({number: 400 - 20 * number for number in range(1, holders + 1)}, [], 512), strict=True)
    )

    def get(key: bytes) -> bytes | None:
        read.append(key)
        return table[key]

    gallop(get, PACKED)
    assert len(read) <= most
