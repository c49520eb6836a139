"""Overlaps: what each worker holds, computed from runs of holders values."""

from dataclasses import dataclass
from struct import pack

from hypothesis import given
from hypothesis import strategies as st

from kvatlas.blocks.residency import BlockKey, Overlap, ShardRuns
from kvatlas.blocks.tiers import Tier, tiers_of
from kvatlas.identity import Scope

BLOCKS = 10
flags = st.sampled_from([Tier.HBM.flag, Tier.CPU_DRAM.flag, Tier.HBM.flag | Tier.CPU_DRAM.flag])


@dataclass(frozen=True)
class Holder:
    """One holder of a shard; `held` has the flags of each block it holds, from the start."""

    number: int
    name: str
    held: list[int]
    active: bool
    later_only: bool  # publishes with another granularity: not the first block, and not every block


@st.composite
def holders(draw: st.DrawFn) -> list[Holder]:
    numbers = draw(st.lists(st.integers(0, (1 << 24) - 1), unique=True, max_size=6))
    return [
        Holder(n, f"w{n}", draw(st.lists(flags, max_size=BLOCKS)), draw(st.booleans()), draw(st.integers(0, 4)) == 0)
        for n in numbers
    ]


def holds(holder: Holder, block: int) -> bool:
    return len(holder.held) > block and not (holder.later_only and block % 2 == 0)


def runs_of(held: list[Holder]) -> ShardRuns:
    values: list[bytes] = []
    lengths: list[int] = []
    for block in range(BLOCKS):
        entries = sorted(h.number << 8 | h.held[block] for h in held if holds(h, block))
        value = pack(f">{len(entries)}I", *entries)
        if not value:
            break
        if values and values[-1] == value:
            lengths[-1] += 1
        else:
            values.append(value)
            lengths.append(1)
    return ShardRuns(values, lengths, {h.number: h.name for h in held if h.active})


@given(holders())
def test_runs_give_each_active_workers_depth_and_flags(held: list[Holder]) -> None:
    shard = runs_of(held)
    length_seen = sum(shard.lengths)
    expected = {h.name: h.held[:length_seen] for h in held if h.active and not h.later_only and h.held}
    actual = {name: [f for length, f in runs for _ in range(length)] for name, runs in shard.runs_by_worker().items()}
    assert actual == expected
    assert shard.depths() == {name: len(blocks) for name, blocks in expected.items()}


@given(holders())
def test_the_runs_of_one_worker_equal_those_computed_for_all_workers(held: list[Holder]) -> None:
    shard = runs_of([h for h in held if not h.later_only])
    together = shard.runs_by_worker()
    for holder in held:
        if holder.name in together:
            alone = [f for length, f in shard.runs_of(holder.name) for _ in range(length)]
            assert alone == [f for length, f in together[holder.name] for _ in range(length)]


@given(holders(), holders())
def test_shards_are_merged_by_worker(one: list[Holder], other: list[Holder]) -> None:
    theirs = [Holder(h.number, f"x{h.number}", h.held, h.active, h.later_only) for h in other]
    first, second = runs_of(one), runs_of(theirs)
    overlap = Overlap([first, second], BLOCKS)
    assert overlap.runs_by_worker() == {**first.runs_by_worker(), **second.runs_by_worker()}
    assert overlap.depths() == {**first.depths(), **second.depths()}


def test_an_empty_shard_has_no_depths_and_no_runs() -> None:
    empty = ShardRuns([], [], {})
    assert empty.depths() == {}
    assert empty.runs_by_worker() == {}
    assert Overlap([empty], 4).runs_of("w1") == []


def test_worked_example_of_tiers() -> None:
    gpu, both = 1 << 8 | Tier.HBM.flag, 1 << 8 | Tier.HBM.flag | Tier.CPU_DRAM.flag
    shard = ShardRuns([pack(">I", both), pack(">I", gpu)], [3, 2], {1: "w1"})
    assert [(length, tiers_of(f)) for length, f in shard.runs_by_worker()["w1"]] == [
        (3, (Tier.HBM, Tier.CPU_DRAM)),
        (2, (Tier.HBM,)),
    ]


def test_a_block_key_carries_its_scope() -> None:
    key = BlockKey(Scope("m", "t", "a", "x"), "root", "00ff", 0, 16)
    assert (key.model_id, key.tokenizer_id, key.adapter_id, key.tenant_id) == ("m", "t", "a", "x")
