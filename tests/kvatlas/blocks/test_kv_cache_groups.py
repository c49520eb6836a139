"""The positions that an engine's KV cache groups allow."""

import pytest

from kvatlas.blocks.kv_cache_groups import AttentionGroup, AttentionKind, ResumptionRule
from kvatlas.errors import InvalidValue

FULL = AttentionGroup(AttentionKind.FULL, 16)


@pytest.mark.parametrize(
    ("group", "tokens", "needed"),
    [
        (AttentionGroup(AttentionKind.SLIDING_WINDOW, 16, window_tokens=128), 1_600, 8),
        (AttentionGroup(AttentionKind.SLIDING_WINDOW, 16, window_tokens=129), 1_600, 8),
        (AttentionGroup(AttentionKind.SLIDING_WINDOW, 16, window_tokens=130), 1_600, 9),
        (AttentionGroup(AttentionKind.SLIDING_WINDOW, 16, window_tokens=1), 1_600, 0),
        (AttentionGroup(AttentionKind.SLIDING_WINDOW_MLA, 16, window_tokens=128), 48, 3),
        (AttentionGroup(AttentionKind.SLIDING_WINDOW, 64, window_tokens=128), 1_600, 2),
        (AttentionGroup(AttentionKind.CHUNKED_LOCAL, 16, chunk_tokens=512), 512, 0),
        (AttentionGroup(AttentionKind.CHUNKED_LOCAL, 16, chunk_tokens=512), 528, 1),
        (AttentionGroup(AttentionKind.CHUNKED_LOCAL, 16, chunk_tokens=512), 1_008, 31),
        (AttentionGroup(AttentionKind.MAMBA, 64), 640, 1),
    ],
)
def test_blocks_needed_before_a_position(group: AttentionGroup, tokens: int, needed: int) -> None:
    assert group.blocks_needed(tokens) == needed
    assert needed <= group.longest_run


def test_an_eagle_window_needs_one_block_more_and_a_mamba_state_none() -> None:
    assert AttentionGroup(AttentionKind.SLIDING_WINDOW, 16, window_tokens=128, eagle=True).longest_run == 9
    assert not AttentionGroup(AttentionKind.MAMBA, 16, eagle=True).drops


def test_residency_is_enough_without_sparse_groups() -> None:
    rule = ResumptionRule.of((FULL, AttentionGroup(AttentionKind.MLA, 16, eagle=True)))
    assert not rule.needs_marks
    assert (rule.block_size, rule.alignment, rule.dropped) == (16, 1, 1)


def test_residency_is_that_of_the_smallest_blocks_of_full_attention() -> None:
    larger = AttentionGroup(AttentionKind.MLA, 64)
    rule = ResumptionRule.of((larger, AttentionGroup(AttentionKind.FULL, 16, eagle=True)))
    assert rule.sparse == (larger,)
    assert (rule.block_size, rule.alignment, rule.dropped) == (16, 4, 1)


def test_windows_may_have_smaller_blocks_than_full_attention() -> None:
    full, mamba = AttentionGroup(AttentionKind.FULL, 64), AttentionGroup(AttentionKind.MAMBA, 64)
    window = AttentionGroup(AttentionKind.SLIDING_WINDOW, 16, window_tokens=128)
    rule = ResumptionRule.of((window, full, mamba), block_size=64)
    assert (rule.parts, rule.sparse, rule.first_bits) == (4, (window, mamba), (1, 16))
    assert (rule.alignment, rule.dropped) == (1, 0)


@pytest.mark.parametrize(
    "other",
    [
        AttentionGroup(AttentionKind.MAMBA, 16),
        AttentionGroup(AttentionKind.SLIDING_WINDOW, 48, window_tokens=128),
        AttentionGroup(AttentionKind.SLIDING_WINDOW, 16, window_tokens=128, eagle=True),
    ],
)
def test_of_other_groups_with_smaller_blocks_nothing_is_computed(other: AttentionGroup) -> None:
    with pytest.raises(InvalidValue, match="but the block size is 64; models with this layout are not supported"):
        ResumptionRule.of((AttentionGroup(AttentionKind.FULL, 64), other), block_size=64)


def test_a_rule_counts_in_the_blocks_that_the_engine_hashes() -> None:
    mamba = AttentionGroup(AttentionKind.MAMBA, 48)
    rule = ResumptionRule.of((AttentionGroup(AttentionKind.FULL, 32, eagle=True), mamba))
    assert rule.needs_marks
    assert rule.sparse == (mamba,)
    assert (rule.block_size, rule.alignment, rule.dropped) == (16, 6, 2)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": AttentionKind.FULL, "block_size": 0}, "block size 0"),
        ({"kind": AttentionKind.SLIDING_WINDOW, "block_size": 16}, "window None"),
        ({"kind": AttentionKind.SLIDING_WINDOW, "block_size": 16, "window_tokens": 0}, "window 0"),
        ({"kind": AttentionKind.CHUNKED_LOCAL, "block_size": 16}, "chunk size None"),
        ({"kind": AttentionKind.CHUNKED_LOCAL, "block_size": 16, "chunk_tokens": 100}, "multiple of its block size 16"),
    ],
)
def test_groups_of_which_nothing_can_be_computed_are_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidValue, match=message):
        AttentionGroup(**fields)  # type: ignore[arg-type]


def test_rules_of_no_engine_are_refused() -> None:
    mamba = AttentionGroup(AttentionKind.MAMBA, 48)
    with pytest.raises(InvalidValue, match="no group of full attention"):
        ResumptionRule.of((mamba,))
    with pytest.raises(InvalidValue, match="full_attention group has blocks of 16 tokens, but the block size is 32"):
        ResumptionRule.of((FULL, mamba), block_size=32)
    with pytest.raises(InvalidValue, match="scheduler block size 16; expected a multiple of 48"):
        ResumptionRule.of((FULL, mamba), alignment_tokens=16)
