"""Ranking a pool by cost, compared with a naive implementation, and examples of each rule."""

from collections.abc import Mapping
from dataclasses import replace
from itertools import groupby
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvatlas.blocks.reuse import ReuseRule, ReuseRules
from kvatlas.blocks.tiers import Tier
from kvatlas.cost import CostProfile, EngineProfile, QuillcacheProfile
from kvatlas.fleet.records import EngineKind, EngineState, FleetRecord, Liveness, Role
from router_client import Prompt, SelectionResult
from router_client.pricing.overlap import HeldPrefix, Run
from router_client.pricing.pool import Pool
from router_client.pricing.quote_desk import quote_candidates
from router_client.pricing.quotes import rendezvous_weight
from router_client.pricing.ranking import rank as rank_pool
from tests.router_client.pools import FETCH_BY, PEER, SCOPE, pool, worker
from tests.router_client.pricing import naive_costs

Held = Mapping[str, HeldPrefix]


def rank(
    prompt: Prompt,
    workers: Mapping[str, FleetRecord],
    held: Held,
    profile: CostProfile,
    *,
    rules: ReuseRules | None = None,
    fingerprint: bytes = b"",
) -> tuple[SelectionResult, ...]:
    return rank_pool(prompt, Pool.of(workers, rules, profile), held, fingerprint=fingerprint)


def prompt(tokens: int, output: int = 10) -> Prompt:
    return Prompt(SCOPE, tokens, tokens=range(tokens), output_tokens=output, fetch_by=FETCH_BY)


def held(tokens: int, *tiers: Tier) -> HeldPrefix:
    return HeldPrefix.of((Run(tokens, tiers or (Tier.HBM,)),))


# ---------------------------------------------------------------- against a naive implementation


tiers = st.sampled_from(Tier)


kinds = st.sampled_from([*EngineKind, EngineKind.STORE])
"""Stores are more frequent, because a worker has to name one by chance."""
named = st.lists(st.sampled_from(["w0", "w1", "w2"]), max_size=2, unique=True).map(tuple)


@st.composite
def fleets(draw: st.DrawFn) -> tuple[dict[str, FleetRecord], dict[str, HeldPrefix]]:
    records: list[FleetRecord] = []
    prefixes: dict[str, HeldPrefix] = {}
    for number in range(draw(st.integers(1, 7))):
        size = draw(st.sampled_from([16, 16, 32]))
        record = worker(
            f"w{number}",
            kind=(kind := draw(kinds)),
            stores=draw(named),
            read_us_per_mib=draw(st.sampled_from([None, 0, 400])) if kind is EngineKind.STORE else None,
            eagle=draw(st.booleans()),
            role=draw(st.sampled_from([Role.BOTH, Role.BOTH, *Role])),
            state=draw(st.sampled_from([EngineState.UP, EngineState.UP, *EngineState])),
            liveness=draw(st.sampled_from([Liveness.ALIVE, Liveness.ALIVE, Liveness.LOST])),
            locality_domain=draw(st.sampled_from(["", "a", "b"])),
            transfer_groups=draw(st.sampled_from([(), ("g",), ("g", "h"), ("h",)])),
            **{**PEER, **draw(st.sampled_from([{}, {}, {"kv_tiers": ("cpu_dram",)}, {"kv_connector": None}]))},
            block_size=size,
            block_bytes=draw(st.sampled_from([0, 1 << 20, 3 << 20])),
            tier_block_bytes=draw(st.sampled_from([{}, {}, {"cpu_dram": 3_000}, {"local_ssd": 5 << 20}])),
            load=draw(
                st.none()
                | st.fixed_dictionaries(
                    {"running_decodes": st.integers(0, 9), "queued_prefill_tokens": st.integers(0, 5_000)}
                )
            ),
        )
        records.append(record)
        runs = draw(st.lists(st.tuples(st.integers(1, 6), tiers)))
        merged = [Run(sum(n for n, _ in same) * size, (key,)) for key, same in groupby(runs[:4], key=lambda r: r[1])]
        if merged:
            prefixes[record.endpoint.id] = HeldPrefix.of(tuple(merged))
    return pool(*records), prefixes


@pytest.mark.parametrize("profile", [EngineProfile(), QuillcacheProfile()], ids=lambda profile: profile.name)
@given(fleet=fleets(), tokens=st.integers(1, 900), output=st.integers(0, 200))
@settings(max_examples=200)
def test_every_candidate_costs_what_a_naive_ranking_says(
    profile: CostProfile, fleet: tuple[dict[str, FleetRecord], dict[str, HeldPrefix]], tokens: int, output: int
) -> None:
    records, prefixes = fleet
    asked = prompt(tokens, output)
    results = rank(asked, records, prefixes, profile, fingerprint=b"f")
    tiers = {id: [run.tiers[0] for run in prefix.runs for _ in range(run.tokens)] for id, prefix in prefixes.items()}
    expected = naive_costs.scores(profile.name, records, tiers, tokens, output, interference=0.0)
    assert {result.worker_id: result.score_us for result in results} == pytest.approx(
        expected, rel=0, abs=2
    )  # rounding
    order = [(result.score_us, -rendezvous_weight(b"f", result.worker_id)) for result in results]
    assert order == sorted(order)
    for result in results:
        assert result.score_us == sum(term.us for term in result.terms)
        assert (result.source is None) == (result.transferred_tokens == 0)


@given(fleets(), st.integers(1, 900), st.randoms(use_true_random=False))
def test_the_order_of_the_pool_does_not_matter(
    fleet: tuple[dict[str, FleetRecord], dict[str, HeldPrefix]], tokens: int, order: object
) -> None:
    records, prefixes = fleet
    shuffled = list(records.items())
    order.shuffle(shuffled)  # type: ignore[attr-defined]
    assert rank(prompt(tokens), dict(shuffled), prefixes, EngineProfile()) == rank(
        prompt(tokens), records, prefixes, EngineProfile()
    )


# ---------------------------------------------------------------- each rule by example


def test_the_longer_overlap_wins_at_equal_load() -> None:
    workers = pool(worker("w1"), worker("w2"), worker("w3"))
    results = rank(prompt(1_000), workers, {"w2": held(320), "w3": held(640)}, EngineProfile())
    assert [result.worker_id for result in results] == ["w3", "w2", "w1"]
    assert [result.usable_tokens for result in results] == [640, 320, 0]
    assert [result.overlap_blocks for result in results] == [40, 20, 0]
    assert {result.required_blocks for result in results} == {63}


def test_a_long_queue_outweighs_an_overlap() -> None:
    workers = pool(
        worker("warm", load={"queued_prefill_tokens": 4_000}), worker("cold", load={"queued_prefill_tokens": 0})
    )
    assert rank(prompt(1_000), workers, {"warm": held(640)}, EngineProfile())[0].worker_id == "cold"


@pytest.mark.parametrize("state", [s for s in EngineState if s is not EngineState.UP])
def test_a_worker_whose_engine_is_not_up_is_no_candidate(state: EngineState) -> None:
    workers = pool(worker("w1", state=state), worker("w2"))
    assert [r.worker_id for r in rank(prompt(100), workers, {"w1": held(96)}, EngineProfile())] == ["w2"]


def test_neither_a_lost_worker_nor_one_that_only_decodes_is_a_candidate() -> None:
    workers = pool(worker("lost", liveness=Liveness.LOST), worker("decodes", role=Role.DECODE))
    assert rank(prompt(100), workers, {"lost": held(96), "decodes": held(96)}, EngineProfile()) == ()


def test_blocks_of_different_size_compare_in_tokens() -> None:
    workers = pool(worker("w16", block_size=16), worker("w64", block_size=64))
    results = rank(prompt(1_000), workers, {"w16": held(496), "w64": held(512)}, EngineProfile())
    assert [(r.worker_id, r.overlap_blocks, r.required_blocks) for r in results] == [("w64", 8, 16), ("w16", 31, 63)]


CAN_NOT: Mapping[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "nothing is known": ({}, {}),
    "the reader can't": ({}, dict(PEER)),
    "the source can't": (dict(PEER), {}),
    "another connector": (dict(PEER), {**PEER, "kv_connector": "kvcr"}),
    "no port": (dict(PEER), {**PEER, "kv_port": None}),
    "no tier": (dict(PEER), {**PEER, "kv_tiers": ()}),
    "another tier": (dict(PEER), {**PEER, "kv_tiers": ("cpu_dram",)}),
    "a public address": (dict(PEER), {**PEER, "base_url": "http://8.8.8.8:8000"}),
    "a name that nobody vouches for": (dict(PEER), {**PEER, "base_url": "http://engine:8000"}),
    "another machine's loopback": (dict(PEER), {**PEER, "base_url": "http://127.0.0.1:8000"}),
    "an engine of another kind": (dict(PEER), {**PEER, "kind": EngineKind.SGLANG}),
    "other marks": (dict(PEER), {**PEER, "marks": True}),
}


@pytest.mark.parametrize("why", CAN_NOT)
def test_a_transfer_that_nothing_carries_out_has_no_price(why: str) -> None:
    mine, theirs = CAN_NOT[why]
    workers = pool(worker("w1", **mine), worker("w2", load={"running_decodes": 5}, **theirs))
    for result in rank(prompt(10_000), workers, {"w2": held(9_600)}, EngineProfile()):
        assert result.source is None
        if result.worker_id == "w1":
            assert result.cost.terms[1].us == 0
            assert result.cost.terms[2].amount == 10_000


@pytest.mark.parametrize(
    ("mine", "theirs", "allowed"),
    [(("a",), ("a",), True), (("a", "b"), ("b", "c"), True), (("a",), ("b",), False), (("a",), (), False)],
)
def test_a_copy_elsewhere_is_read_only_within_a_shared_transfer_group(
    mine: tuple[str, ...], theirs: tuple[str, ...], allowed: bool
) -> None:
    workers = pool(worker("w1", transfer_groups=mine, **PEER), worker("w2", transfer_groups=theirs, **PEER))
    result = next(r for r in rank(prompt(10_000), workers, {"w2": held(9_600)}, EngineProfile()) if r.worker_id == "w1")
    assert (result.source, result.transferred_tokens) == (("w2", 9_600) if allowed else (None, 0))
    assert (result.usable_tokens, result.resident_tokens) == (0, 0)


def test_neighbours_in_one_nearest_tier_are_one_piece() -> None:
    prefix = HeldPrefix.of((Run(320, (Tier.CPU_DRAM, Tier.LOCAL_SSD)), Run(320, (Tier.CPU_DRAM,))))
    apart, together = [
        rank(prompt(1_000), pool(worker("w1")), {"w1": held}, EngineProfile())[0].cost.terms[1]
        for held in (prefix, HeldPrefix.of((Run(640, (Tier.CPU_DRAM,)),)))
    ]
    assert apart == together


def test_a_copy_that_is_dearer_to_read_than_to_compute_is_not_read() -> None:
    far: dict[str, Any] = {**PEER, "block_bytes": 64 << 20}
    workers = pool(worker("w1", **far), worker("w2", state=EngineState.DRAINING, **far))
    (result,) = rank(prompt(10_000), workers, {"w2": held(9_600, Tier.OBJECT_STORE)}, EngineProfile())
    assert result.source is None


def test_a_draining_worker_may_still_be_read_but_a_lost_one_may_not() -> None:
    group: dict[str, Any] = dict(PEER)
    for record, source in [
        (worker("w2", state=EngineState.DRAINING, **group), "w2"),
        (worker("w2", state=EngineState.ASLEEP, **group), None),
        (worker("w2", liveness=Liveness.LOST, **group), None),
    ]:
        (result,) = rank(prompt(10_000), pool(worker("w1", **group), record), {"w2": held(9_600)}, EngineProfile())
        assert result.source == source


def test_blocks_of_another_size_can_not_be_read() -> None:
    workers = pool(worker("w1", **PEER), worker("w2", **PEER, block_size=32, role=Role.DECODE))
    (result,) = rank(prompt(10_000), workers, {"w2": held(9_600)}, EngineProfile())
    assert result.source is None


def test_the_nearer_of_two_equal_copies_is_read() -> None:
    def at(id: str, domain: str, role: Role) -> FleetRecord:
        return worker(id, **PEER, locality_domain=domain, role=role)

    workers = pool(at("far", "b", Role.DECODE), at("near", "a", Role.DECODE), at("me", "a", Role.BOTH))
    prefixes = {"far": held(9_600), "near": held(9_600)}
    (result,) = rank(prompt(10_000), workers, prefixes, QuillcacheProfile())
    assert result.source == "near"
    assert {term.name: term.us for term in result.terms}["domain"] == 0


def test_a_sender_that_passes_no_source_on_gets_no_price_of_one() -> None:
    workers = pool(worker("w1", **PEER), worker("w2", state=EngineState.DRAINING, **PEER))
    (result,) = rank(replace(prompt(10_000), fetch_by=frozenset()), workers, {"w2": held(9_600)}, EngineProfile())
    assert (result.source, result.cached_tokens) == (None, 0)


def test_an_engine_that_finds_its_source_itself_reads_it_whatever_that_costs() -> None:
    lmcache = {**PEER, "kv_connector": "lmcache", "kv_port": None, "block_bytes": 64 << 20}
    workers = pool(worker("w1", **lmcache), worker("w2", state=EngineState.DRAINING, **lmcache))
    asked = replace(prompt(10_000), fetch_by=frozenset())
    (result,) = rank(asked, workers, {"w2": held(9_600, Tier.OBJECT_STORE)}, EngineProfile())
    assert (result.source, result.transferred_tokens) == ("w2", 9_600)


def test_only_what_lies_in_the_sources_fetchable_tiers_is_fetched() -> None:
    only_dram = {**PEER, "kv_tiers": ("cpu_dram",)}
    workers = pool(worker("w1", **only_dram), worker("w2", state=EngineState.DRAINING, **only_dram))
    prefix = HeldPrefix.of(
        (Run(3_200, (Tier.HBM, Tier.CPU_DRAM)), Run(3_200, (Tier.HBM,)), Run(1_600, (Tier.CPU_DRAM,)))
    )
    (result,) = rank(prompt(10_000), workers, {"w2": prefix}, EngineProfile())
    assert result.transferred_tokens == 3_200
    dear = 50 + 200 * (50 + 25)  # host memory over the network, not HBM, which is nearer to its own engine
    assert {term.name: term.us for term in result.terms}["transfer"] == dear


def test_what_marks_need_beyond_the_fetchable_tiers_makes_a_copy_worthless() -> None:
    fields = {**PEER, "marks": True, "kv_tiers": ("cpu_dram",)}
    workers = pool(worker("w1", **fields), worker("w2", state=EngineState.DRAINING, **fields))
    runs = (Run(3_200, (Tier.HBM, Tier.CPU_DRAM)), Run(3_200, (Tier.HBM,)))
    for reach, fetched in ((4_800, 0), (3_200, 3_200)):
        (result,) = rank(prompt(10_000), workers, {"w2": HeldPrefix.of(runs, reach)}, EngineProfile())
        assert result.transferred_tokens == fetched


def test_a_booking_may_choose_among_the_first_equal_sources_and_each_reader_has_others() -> None:
    sources = [f"s{number:02}" for number in range(20)]
    readers = ("w1", "w2")
    workers = pool(*(worker(id, role=Role.DECODE, **PEER) for id in sources), *(worker(id, **PEER) for id in readers))
    copies = {id: held(9_600) for id in sources}
    offered = []
    for some in (sources[:3], sources):
        held_by = {id: copies[id] for id in some}
        quotes = quote_candidates(prompt(10_000), Pool.of(workers), held_by, fingerprint=b"")
        offered += [quote.fetching for quote in quotes if quote.fetching is not None]
    assert len(offered) == 4 and len({one.us for one in offered}) == 1
    assert set(offered[0].sources) == set(offered[1].sources) == set(sources[:3])
    assert [len(set(one.sources)) for one in offered[2:]] == [16, 16]
    assert set(offered[2].sources) != set(offered[3].sources)


@pytest.mark.parametrize("sizes", [(3_000, 2 << 20), (2 << 20, 3_000), (3_000, 0), (0, 3_000)])
def test_of_equally_deep_copies_the_cheaper_one_is_read(sizes: tuple[int, int]) -> None:
    me = worker("me", **PEER)
    peers = [
        worker(id, **{**PEER, "block_bytes": size}, role=Role.DECODE) for id, size in zip("ab", sizes, strict=True)
    ]
    both = {id: held(9_600, Tier.CPU_DRAM) for id in "ab"}
    (result,) = rank(prompt(10_000), pool(me, *peers), both, EngineProfile())
    assert result.source == "ab"[sizes.index(3_000)]


def test_sources_are_equal_if_what_is_read_of_them_is() -> None:
    """Block sizes in other tiers change no price."""
    others: dict[int, dict[str, Any]] = {2: {"tier_block_bytes": {"local_ssd": 5}}, 3: {"block_bytes": 2 << 20}}
    peers = [worker(f"s{n}", **{**PEER, **others.get(n, {})}, role=Role.DECODE) for n in range(5)]
    copies = {f"s{n}": held(9_600) for n in range(5)} | {"s1": HeldPrefix.of((Run(9_600, (Tier.HBM, Tier.CPU_DRAM)),))}
    (quote,) = quote_candidates(prompt(10_000), Pool.of(pool(worker("w", **PEER), *peers)), copies, fingerprint=b"")
    assert quote.fetching is not None and set(quote.fetching.sources) == {"s0", "s1", "s2", "s4"}


def test_nothing_is_fetched_from_a_worker_that_the_request_may_not_have() -> None:
    workers = pool(worker("w1", **PEER), worker("w2", state=EngineState.DRAINING, **PEER))
    whole = Pool.of({**workers, "w2": workers["w2"].model_copy(update={"tenants": ("acme",)})})
    for narrowed, source in (
        (whole.of_tenant("acme"), "w2"),
        (whole.of_tenant("other"), None),
        (whole.without({"w2"}), None),
    ):
        (result,) = rank_pool(prompt(10_000), narrowed, {"w2": held(9_600)})
        assert result.source == source


def test_an_unknown_load_is_the_pools_mean() -> None:
    workers = pool(
        worker("idle", load={"running_decodes": 0}), worker("busy", load={"running_decodes": 8}), worker("silent")
    )
    results = rank(prompt(100), workers, {}, EngineProfile())
    assert [result.worker_id for result in results] == ["idle", "silent", "busy"]
    assert [result.load_known for result in results] == [True, False, True]
    assert "load unknown" in results[1].explain()


def test_a_reuse_rule_can_be_set() -> None:
    workers = pool(worker("w1"), worker("w2"))
    rules = ReuseRules(by_worker={"w1": ReuseRule(dropped_blocks=10)})
    results = rank(prompt(1_000), workers, {"w1": held(640), "w2": held(560)}, EngineProfile(), rules=rules)
    assert [(r.worker_id, r.usable_tokens) for r in results] == [("w2", 560), ("w1", 480)]


def test_ties_spread_evenly_over_prompts_and_stay_for_one() -> None:
    workers = pool(*(worker(f"w{i}") for i in range(8)))
    picked = [
        rank(prompt(100), workers, {}, EngineProfile(), fingerprint=i.to_bytes(8, "little"))[0].worker_id
        for i in range(4_000)
    ]
    counts = [picked.count(f"w{i}") for i in range(8)]
    assert all(400 <= count <= 600 for count in counts), counts
    again = rank(prompt(100), workers, {}, EngineProfile(), fingerprint=(7).to_bytes(8, "little"))
    assert again[0].worker_id == picked[7]


def test_a_lost_worker_moves_only_its_own_prompts() -> None:
    workers = pool(*(worker(f"w{i}") for i in range(8)))
    fewer = {id: record for id, record in workers.items() if id != "w3"}
    for i in range(300):
        fingerprint = i.to_bytes(8, "little")
        before = rank(prompt(100), workers, {}, EngineProfile(), fingerprint=fingerprint)
        after = rank(prompt(100), fewer, {}, EngineProfile(), fingerprint=fingerprint)
        assert [r.worker_id for r in before if r.worker_id != "w3"] == [r.worker_id for r in after]


def test_a_worker_without_a_block_size_is_a_candidate_that_holds_nothing() -> None:
    (result,) = rank(prompt(100), pool(worker("new", block_size=None)), {}, EngineProfile())
    assert (result.overlap_blocks, result.required_blocks, result.usable_tokens) == (0, 0, 0)
