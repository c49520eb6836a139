"""Cost profiles: the promises of each, and worked examples."""

from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvatlas.blocks.tiers import Tier
from kvatlas.cost import CostProfile, EngineProfile, EngineRates, Load, Piece, Plan, QuillcacheProfile, ReadRate
from kvatlas.cost.protocol import MIB_BYTES, mean_load
from kvatlas.errors import InvalidValue
from kvatlas.fleet.records import ForwardPassMetrics, WorkerState
from tests.kvatlas.strategies import tiers

PROFILES: list[CostProfile] = [QuillcacheProfile(), EngineProfile()]
each_profile = pytest.mark.parametrize("profile", PROFILES, ids=lambda profile: profile.name)

counts = st.integers(0, 100_000)
loads = st.builds(Load, st.integers(0, 500), counts, st.integers(0, 100), st.integers(0, 10_000_000))
rates = st.builds(ReadRate, st.integers(0, 100_000), st.integers(0, 10_000))
pieces = st.builds(
    Piece,
    st.integers(1, 5_000),
    st.integers(0, 4 << 30),
    tiers,
    own=st.booleans(),
    same_domain=st.booleans(),
    rate=st.none() | rates,
)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    parts = draw(st.lists(pieces, max_size=4))
    tokens = sum(piece.tokens for piece in parts) + draw(st.integers(1, 50_000))
    return Plan("w1", tokens, draw(st.integers(0, 4_000)), tuple(parts), draw(loads))


@each_profile
@given(plan=plans())
def test_terms_are_whole_and_sum_to_the_score(profile: CostProfile, plan: Plan) -> None:
    cost = profile.price(plan)
    assert cost.profile == profile.name
    assert all(type(term.us) is int and term.us >= 0 for term in cost.terms)
    assert cost.score_us == sum(term.us for term in cost.terms)


@each_profile
@given(plan=plans())
def test_equal_plans_cost_the_same_in_the_same_terms(profile: CostProfile, plan: Plan) -> None:
    cost = profile.price(plan)
    assert profile.price(plan) == cost
    assert [term.name for term in cost.terms] == [term.name for term in profile.price(Plan("w2", 1, 0)).terms]


@each_profile
@given(blocks=st.integers(1, 500), tail=st.integers(1, 100), load=loads, output=st.integers(0, 999), data=st.data())
def test_more_overlap_at_hand_never_costs_more(
    profile: CostProfile, blocks: int, tail: int, load: Load, output: int, data: st.DataObject
) -> None:
    held = data.draw(st.integers(0, blocks - 1))
    more = data.draw(st.integers(held + 1, blocks))
    less, better = (
        profile.price(
            Plan("w", blocks * 16 + tail, output, [Piece(n * 16, n * MIB_BYTES, Tier.HBM)] if n else [], load)
        )
        for n in (held, more)
    )
    assert better.score_us < less.score_us


@each_profile
@given(plan=plans(), more=loads)
def test_more_load_never_costs_less(profile: CostProfile, plan: Plan, more: Load) -> None:
    busier = plan._replace(load=plan.load + more)
    assert profile.price(busier).score_us >= profile.price(plan).score_us


@each_profile
@given(plan=plans(), data=st.data())
def test_a_nearer_copy_never_costs_more(profile: CostProfile, plan: Plan, data: st.DataObject) -> None:
    if not plan.pieces:
        return
    at = data.draw(st.integers(0, len(plan.pieces) - 1))
    piece = plan.pieces[at]
    changes = [piece._replace(same_domain=True), piece._replace(own=True), Piece(piece.tokens, piece.bytes, Tier.HBM)]
    if piece.own:
        changes.append(piece._replace(same_domain=False))  # its own copy is never far
    for nearer in changes:
        swapped = plan._replace(pieces=[*plan.pieces[:at], nearer, *plan.pieces[at + 1 :]])
        assert profile.price(swapped).score_us <= profile.price(plan).score_us


# ---------------------------------------------------------------- quillcache


def quillcache(*parts: Piece, input_tokens: int = 0, output: int = 0, load: Load | None = None) -> dict[str, int]:
    cached = sum(piece.tokens for piece in parts)
    cost = QuillcacheProfile().price(Plan("w", input_tokens or cached, output, parts, load or Load()))
    return {term.name: term.us for term in cost.terms if term.us}


@given(st.integers(1, 100_000), st.integers(0, 8 << 30), st.booleans())
def test_quillcache_an_own_hbm_hit_is_flat(tokens: int, size: int, near: bool) -> None:
    assert quillcache(Piece(tokens, size, Tier.HBM, same_domain=near)) == {"hbm_hit": 5}


@pytest.mark.parametrize(
    ("tier", "us_per_mib"),
    [(Tier.REMOTE_HBM, 20), (Tier.CPU_DRAM, 55), (Tier.LOCAL_SSD, 280), (Tier.OBJECT_STORE, 1_800)],
)
@pytest.mark.parametrize(
    ("size", "mib"), [(0, 1), (1, 1), (MIB_BYTES, 1), (MIB_BYTES + 1, 2), (10 * MIB_BYTES, 10), (10_000_000, 10)]
)
def test_quillcache_tiers_cost_by_the_mib_rounded_up(tier: Tier, us_per_mib: int, size: int, mib: int) -> None:
    price = us_per_mib * mib
    assert quillcache(Piece(16, size, tier)) == {"transfer": price}
    assert quillcache(Piece(16, size, tier, own=False)) == {"transfer": price}
    far = Piece(16, size, tier, own=False, same_domain=False)
    assert quillcache(far) == {"transfer": price, "domain": 350}
    assert QuillcacheProfile().read_us(far) == price + 350


def test_quillcache_hbm_of_another_worker_is_remote_hbm() -> None:
    assert quillcache(Piece(16, 3 * MIB_BYTES, Tier.HBM, own=False)) == {"transfer": 60}
    assert quillcache(Piece(16, 3 * MIB_BYTES, Tier.HBM, own=False, same_domain=False)) == {
        "transfer": 60,
        "domain": 350,
    }


def test_quillcache_the_same_worker_pays_no_domain_penalty() -> None:
    assert quillcache(Piece(16, 0, Tier.CPU_DRAM, own=True, same_domain=False)) == {"transfer": 55}


def test_quillcache_a_worked_example() -> None:
    # 1,000 tokens: 512 in the worker's HBM, 256 in its DRAM (4.5 MiB), 232 to compute; 3 running, 700 queued
    load = Load(running_decodes=3, queued_prefill_tokens=700, waiting_requests=9)
    parts = (Piece(512, 9 << 20, Tier.HBM), Piece(256, 9 << 19, Tier.CPU_DRAM))
    assert quillcache(*parts, input_tokens=1_000, output=100, load=load) == {
        "prefill": 232 * 45,
        "hbm_hit": 5,
        "transfer": 5 * 55,
        "queue": 700 * 4,
        "decode": 100 * 80,
        "running": 3 * 1_500,
    }


def test_quillcache_every_coefficient_can_be_set() -> None:
    doubled = QuillcacheProfile(**{f.name: 2 * getattr(QuillcacheProfile(), f.name) for f in fields(QuillcacheProfile)})
    parts = (Piece(16, 0, Tier.HBM), *(Piece(16, 0, tier, own=False, same_domain=False) for tier in Tier))
    plan = Plan("w", 200, 10, parts, Load(1, 1))
    assert doubled.price(plan).score_us == 2 * QuillcacheProfile().price(plan).score_us


@pytest.mark.parametrize("name", [f.name for f in fields(QuillcacheProfile)])
def test_quillcache_a_negative_coefficient_is_named(name: str) -> None:
    with pytest.raises(InvalidValue, match=f"{name} is -1"):
        QuillcacheProfile(**{name: -1})


# ---------------------------------------------------------------- engine


def test_engine_a_worked_example() -> None:
    # 4,096 tokens, 3,072 of them held; 2,000 queued; 7 requests run on 50,000 KV tokens; 200 tokens to generate
    plan = Plan("w", 4_096, 200, [Piece(3_072, 0, Tier.HBM)], Load(7, 2_000, 0, 50_000))
    cost = EngineProfile().price(plan)
    assert {term.name: term.us for term in cost.terms} == {
        "backlog": 2_000 * 40,
        "transfer": 0,
        "prefill": round(1_024 * 40 + 0.0013 * 1_024 * (3_072 + 512)),
        "decode_steps": 200 * 7_000,
        "decode_running": 200 * 8 * 40,
        "decode_kv": round(200 * 0.045 * 54_096),
    }
    assert cost.ttft_us == 80_000 + 45_731
    assert cost.tpot_us == round(7_000 + 320 + 0.045 * 54_096)


def test_engine_a_transfer_is_charged_per_contiguous_piece() -> None:
    rates = EngineRates()
    whole = rates.read_us(Piece(1_024, 128 * MIB_BYTES, Tier.CPU_DRAM))
    halves = 2 * rates.read_us(Piece(512, 64 * MIB_BYTES, Tier.CPU_DRAM))
    assert whole == 50 + 128 * 50
    assert halves == whole + 50


def test_engine_a_block_of_unknown_size_is_sized_by_its_tokens() -> None:
    rates = EngineRates(kv_bytes_per_token=MIB_BYTES)
    assert rates.read_us(Piece(16, 0, Tier.LOCAL_SSD)) == rates.read_us(Piece(16, 16 * MIB_BYTES, Tier.LOCAL_SSD))


def test_engine_another_workers_lower_tier_crosses_the_network_too() -> None:
    rates, size = EngineRates(), 8 * MIB_BYTES
    assert rates.read_us(Piece(64, size, Tier.HBM, own=False)) == 100 + 8 * 25
    assert rates.read_us(Piece(64, size, Tier.CPU_DRAM, own=False)) == 50 + 8 * 50 + 8 * 25
    assert rates.read_us(Piece(64, size, Tier.CPU_DRAM, own=False, same_domain=False)) == 50 + 8 * 75 + 350


def test_engine_queued_work_is_priced_at_the_workers_own_prefill_rate() -> None:
    slow = EngineRates(prefill_us_per_token=400.0)
    profile = EngineProfile(by_worker={"slow": slow})
    backlog = {
        worker: profile.price(Plan(worker, 1, 0, (), Load(queued_prefill_tokens=10))).terms[0].us
        for worker in ("slow", "fast")
    }
    assert backlog == {"slow": 4_000, "fast": 400}


def test_engine_waiting_requests_count_if_queued_tokens_are_unknown() -> None:
    waiting = WorkerState(id="w", forward_pass=ForwardPassMetrics(requests_waiting=2))
    reported = WorkerState(id="w", queued_prefill_tokens=100, forward_pass=ForwardPassMetrics(requests_waiting=2))
    backlogs = [
        EngineProfile().price(Plan("w", 1, 0, (), Load.of(state, 16))).terms[0].us for state in (waiting, reported)
    ]
    assert backlogs == [2 * 1_024 * 40, 100 * 40]


@pytest.mark.parametrize("name", [f.name for f in fields(EngineRates) if f.type not in ("ReadRate", ReadRate)])
def test_engine_a_negative_rate_is_named(name: str) -> None:
    with pytest.raises(InvalidValue, match=f"{name} is -1"):
        replace(EngineRates(), **{name: -1})  # type: ignore[arg-type]


@pytest.mark.parametrize("rate", [(-1.0, 0.0), (0.0, -1.0), (float("nan"), 0.0)])
def test_engine_a_negative_read_rate_is_refused(rate: tuple[float, float]) -> None:
    with pytest.raises(InvalidValue, match="read rate"):
        ReadRate(*rate)


# ---------------------------------------------------------------- load


def test_a_workers_state_as_load() -> None:
    forward = ForwardPassMetrics(active_request_slots=5, active_kv_blocks=100)
    assert Load.of(WorkerState(id="w", running_decodes=2, forward_pass=forward), 16) == Load(2, 0, 0, 1_600)
    assert Load.of(WorkerState(id="w", forward_pass=forward), 16) == Load(5, 0, 0, 1_600)


@given(st.lists(loads, min_size=1, max_size=5))
def test_the_mean_load_lies_between_the_extremes(some: list[Load]) -> None:
    mean = mean_load(some)
    for name in ("running_decodes", "queued_prefill_tokens", "waiting_requests", "kv_tokens"):
        values = [getattr(load, name) for load in some]
        assert min(values) <= getattr(mean, name) <= max(values)


def test_without_known_loads_the_mean_is_idle() -> None:
    assert mean_load([]) == Load()


@given(plan=plans())
def test_the_fixed_prices_of_prefill_decode_queue_and_transfers_add_up_to_a_plans_score(plan: Plan) -> None:
    profile, load = QuillcacheProfile(), plan.load
    transfers = sum(
        profile.transfer_us(one.bytes, one.tier, own=one.own, same_domain=one.same_domain) for one in plan.pieces
    )
    decode_us = profile.decode_us(plan.output_tokens, load.running_decodes)
    by_part = profile.prefill_us(plan.new_tokens) + decode_us + profile.queue_us(load.queued_prefill_tokens) + transfers
    assert by_part == profile.price(plan).score_us


def test_each_fixed_price_by_itself() -> None:
    profile = QuillcacheProfile()
    assert (profile.prefill_us(100), profile.queue_us(100), profile.decode_us(10, 2)) == (4_500, 400, 800 + 3_000)
    assert profile.transfer_us(3 * MIB_BYTES + 1, Tier.CPU_DRAM) == 4 * 55
    assert profile.transfer_us(0, Tier.HBM) == 5
    assert profile.transfer_us(MIB_BYTES, Tier.HBM, own=False, same_domain=False) == 20 + 350
