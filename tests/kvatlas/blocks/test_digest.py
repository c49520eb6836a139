"""The residency digest is a sum over the held blocks, in any order of changes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvatlas.blocks.digest import WORDS, Digest
from kvatlas.blocks.hashing import pack_hashes
from kvatlas.blocks.tiers import Tier
from kvatlas.errors import InvalidValue
from kvatlas.identity import Scope
from tests.kvatlas.strategies import hash_values, tiers

scope_ids = st.binary(min_size=8, max_size=8)
held = st.sets(st.tuples(scope_ids, tiers, hash_values), max_size=20)


def by_definition(held: set[tuple[bytes, Tier, int]]) -> list[int]:
    words = [0] * WORDS
    for scope_id, tier, value in held:
        words[3 * tier] += 1
        for half in (0, 1):
            factor = int.from_bytes(scope_id[4 * half : 4 * half + 4], "little") & 0xFFFFF | 1
            part = value >> 32 * half & 0xFFFFFFFF
            words[3 * tier + 1 + half] = (words[3 * tier + 1 + half] + part * factor) & 0xFFFFFFFF
    return words


def digest_of(held: list[tuple[bytes, Tier, int]]) -> Digest:
    digest = Digest()
    for scope_id, tier, value in held:
        digest.add(scope_id, tier, pack_hashes([value]))
    return digest


@given(held)
def test_a_digest_equals_its_definition(blocks: set[tuple[bytes, Tier, int]]) -> None:
    digest = digest_of(list(blocks))
    assert digest.words == by_definition(blocks)
    assert digest.blocks == len(blocks)
    assert [digest.count(tier) for tier in Tier] == [sum(t is tier for _, t, _ in blocks) for tier in Tier]


@given(scope_ids, tiers, st.lists(hash_values, max_size=300, unique=True))
def test_a_batch_equals_its_single_blocks(scope_id: bytes, tier: Tier, hashes: list[int]) -> None:
    digest = Digest()
    digest.add(scope_id, tier, pack_hashes(hashes))
    assert digest == digest_of([(scope_id, tier, value) for value in hashes])


@given(held, held, st.randoms())
def test_removals_undo_stores_in_any_order(
    kept: set[tuple[bytes, Tier, int]], gone: set[tuple[bytes, Tier, int]], order: object
) -> None:
    steps = [(1, block) for block in kept | gone] + [(-1, block) for block in gone - kept]
    order.shuffle(steps)  # type: ignore[attr-defined]
    digest = Digest()
    for sign, (scope_id, tier, value) in steps:
        digest.add(scope_id, tier, pack_hashes([value]), sign)
    assert digest.words == by_definition(kept)


def test_scope_and_tier_change_the_digest() -> None:
    one, other = Scope("m", "t").scope_id, Scope("m", "t", "adapter").scope_id
    digests = [digest_of([(s, t, 7)]).words for s in (one, other) for t in (Tier.HBM, Tier.CPU_DRAM)]
    assert len({tuple(words) for words in digests}) == 4


@given(held)
def test_a_digest_round_trips_through_its_words_and_a_copy_is_independent(blocks: set[tuple[bytes, Tier, int]]) -> None:
    digest = digest_of(list(blocks))
    restored = Digest(digest.words)
    copy = digest.copy()
    assert digest == restored == copy
    copy.add(b"scope--1", Tier.HBM, pack_hashes([1]))
    assert digest == restored != copy


@pytest.mark.parametrize("words", [[], [0] * 14, [0] * 16, [-1] + [0] * 14, ["0"] * 15, [0.0] * 15])
def test_malformed_words_are_refused(words: list[int]) -> None:
    with pytest.raises(InvalidValue, match="15"):
        Digest(words)
