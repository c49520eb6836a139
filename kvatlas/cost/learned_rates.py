"""From finished requests to the rates of the profile `engine`, and back: what a request tells, and what follows from it.

An answer that comes in one piece tells nothing unless it is one token long: what decoding took of it can't be told from how
often the prefill of others came in between.

The units of what is learned are the documented defaults of `EngineRates` (`kvatlas/cost/engine.py`), and for transfers what
its default rates would take for the pieces read: so evidence means the same to routers that are configured differently.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final, TypeGuard

from kvatlas.blocks.tiers import Tier
from kvatlas.cost.engine import EngineProfile, EngineRates, ReadRate
from kvatlas.cost.protocol import MIB_BYTES, Load, Piece, Plan
from kvatlas.cost.regression import RATES, Estimate, Evidence, Kind, Rate, Row, Vector

UNITS: Final = EngineRates()
OVERHEAD_US: Final = 5_000.0
"""Unit of what passes before a first token whatever is computed: the way there, scheduling, the step that is just running.
It is learned so that it does not count as prefill; it prices nothing."""

MOST_QUEUED: Final = 0.5
"""Requests that met more queued tokens than this part of their own say nothing of the prefill: how far the queue's first had
got is not known."""
LONGEST_US: Final = 3.6e9

ALIKE: Final = 0.1
"""Workers within this of the middle of their times are taken for equal: rates are not known better, and whichever seemed a
little faster would get most of the requests."""
USUAL_PREFILL: Final = (1_024, 1_024)
USUAL_DECODE: Final = (8, 16_384)
"""New and cached tokens, running requests and KV tokens, at which workers are compared."""
_USUAL_PIECE_BYTES: Final = 16 * MIB_BYTES
_RATE_OF: Final = {
    Tier.HBM: Rate.REMOTE_HBM,  # read from another worker's
    Tier.REMOTE_HBM: Rate.REMOTE_HBM,
    Tier.CPU_DRAM: Rate.CPU_DRAM,
    Tier.LOCAL_SSD: Rate.LOCAL_SSD,
    Tier.OBJECT_STORE: Rate.OBJECT_STORE,
}


@dataclass(frozen=True, slots=True)
class Finished:
    """A request that ended well. None: not measured, or not known.

    `plan`: as it was priced when the worker was chosen. `load_known`: its load is what the worker tells; `waited`: it also
    had to wait for a prefix that was being computed. `load_after`: the worker's load at the end, with this request in it.
    `prompt_tokens`, `cached_tokens` (not computed) and `output_tokens`: as the engine said. `ttft_us`: from sending it to
    its first token. `tpot_us`: from one token to the next as usual, which is the median: the mean has the prefill of others
    in it, which engines do in between.
    """

    plan: Plan
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int | None = None
    load_known: bool = True
    waited: bool = False
    load_after: Load | None = None
    ttft_us: float | None = None
    tpot_us: float | None = None


def rows_of(request: Finished) -> tuple[Row, ...]:
    """What a request tells; empty where it tells nothing that is sure: load not known, too much queued before it, no
    tokens, times that can't be."""
    if not request.load_known or request.prompt_tokens <= 0 or request.output_tokens <= 0:
        return ()
    rows = []
    first = _before_first(request)
    if first is not None and _possible(request.ttft_us):
        terms, apart_us = first
        rows.append(Row(Kind.FIRST, request.ttft_us - apart_us, terms))
    if request.output_tokens > 1 and _possible(request.tpot_us):
        rows.append(Row(Kind.NEXT, request.tpot_us, _each_next(request)))
    return tuple(row for row in rows if row.us > 0)


def _before_first(request: Finished) -> tuple[Vector, float] | None:
    """The terms of the time to the first token, and what in it is not learned; None where they are not known."""
    plan, load = request.plan, request.plan.load
    moved = [piece for piece in plan.pieces if not piece.at_hand]
    cached = request.cached_tokens
    if cached is None and request.prompt_tokens == plan.input_tokens:
        cached = plan.cached_tokens
    if cached is None or not 0 <= cached < request.prompt_tokens or request.waited or load.waiting_requests:
        return None
    if moved and cached != plan.cached_tokens:  # then it is not known what was read
        return None
    new = request.prompt_tokens - cached
    if load.queued_prefill_tokens > MOST_QUEUED * new:
        return None
    terms = [0.0] * RATES
    terms[Rate.OVERHEAD] = OVERHEAD_US
    terms[Rate.PREFILL] = UNITS.prefill_us_per_token * (new + load.queued_prefill_tokens)
    terms[Rate.ATTENTION] = UNITS.prefill_us(new, cached) - UNITS.prefill_us_per_token * new
    apart_us = 0.0
    for piece in moved:
        own, network_us, domain_us = _reading(piece)
        terms[_RATE_OF[piece.price_tier]] += own
        terms[Rate.REMOTE_HBM] += network_us
        apart_us += domain_us
    return tuple(terms), apart_us


def _reading(piece: Piece) -> tuple[float, float, float]:
    """What reading a piece takes at its unit: of its tier, of the network, of the way to another domain."""
    mib = (piece.bytes or piece.tokens * UNITS.kv_bytes_per_token) / MIB_BYTES
    rate = UNITS.read_rate(piece.price_tier)
    own = rate.setup_us + rate.us_per_mib * mib
    crosses = not piece.own and piece.price_tier is not Tier.REMOTE_HBM
    network_us = UNITS.remote_hbm.us_per_mib * mib if crosses else 0.0
    return own, network_us, UNITS.read_us(piece) - own - network_us


def _each_next(request: Finished) -> Vector:
    """The terms of the time from one token to the next: by the mean of the load at the request's start and at its end."""
    load, after, output = request.plan.load, request.load_after, request.output_tokens
    running, kv_tokens = float(load.running_decodes + 1), float(load.kv_tokens + request.prompt_tokens)
    if after is not None:
        running = (running + max(1, after.running_decodes)) / 2
        kv_tokens = (kv_tokens + max(request.prompt_tokens, after.kv_tokens)) / 2
    terms = [0.0] * RATES
    terms[Rate.TPOT_BASE] = UNITS.tpot_base_us
    terms[Rate.TPOT_RUNNING] = UNITS.tpot_us_per_running * running
    terms[Rate.TPOT_KV] = UNITS.tpot_us_per_kv_token * (kv_tokens + output / 2)
    return tuple(terms)


def _possible(us: float | None) -> TypeGuard[float]:
    return us is not None and 0 < us < LONGEST_US


@dataclass(frozen=True, slots=True)
class LearnedRates:
    """What was learned of a worker from so many requests. `overhead_us`: see OVERHEAD_US. `first_error` and `next_error`:
    how far off the times to the first and from token to token lately were, as usual, relative."""

    requests: int
    rates: EngineRates
    overhead_us: float
    first_error: float
    next_error: float


def prior_of(configured: EngineRates) -> Vector:
    """The configured rates in times of the units."""
    prior = [1.0] * RATES
    prior[Rate.PREFILL] = configured.prefill_us_per_token / UNITS.prefill_us_per_token
    prior[Rate.ATTENTION] = configured.attention_us_per_token_pair / UNITS.attention_us_per_token_pair
    for tier, rate in _RATE_OF.items():
        prior[rate] = _piece_us(configured.read_rate(tier)) / _piece_us(UNITS.read_rate(tier))
    prior[Rate.TPOT_BASE] = configured.tpot_base_us / UNITS.tpot_base_us
    prior[Rate.TPOT_RUNNING] = configured.tpot_us_per_running / UNITS.tpot_us_per_running
    prior[Rate.TPOT_KV] = configured.tpot_us_per_kv_token / UNITS.tpot_us_per_kv_token
    return tuple(prior)


def estimate_of(evidence: Evidence, configured: EngineRates) -> Estimate:
    """What evidence makes of the configured rates."""
    return Estimate.of(evidence, prior_of(configured))


def learned_of(estimate: Estimate, configured: EngineRates) -> LearnedRates:
    """An estimate as rates. A transfer keeps its configured shape, set-up against bandwidth."""
    factors, prior = estimate.factors, prior_of(configured)

    def reading(tier: Tier) -> ReadRate:
        rate, factor = configured.read_rate(tier), _RATE_OF[tier]
        times = factors[factor] / prior[factor] if prior[factor] else 1.0
        return ReadRate(rate.setup_us * times, rate.us_per_mib * times)

    rates = replace(
        configured,
        prefill_us_per_token=UNITS.prefill_us_per_token * factors[Rate.PREFILL],
        attention_us_per_token_pair=UNITS.attention_us_per_token_pair * factors[Rate.ATTENTION],
        tpot_base_us=UNITS.tpot_base_us * factors[Rate.TPOT_BASE],
        tpot_us_per_running=UNITS.tpot_us_per_running * factors[Rate.TPOT_RUNNING],
        tpot_us_per_kv_token=UNITS.tpot_us_per_kv_token * factors[Rate.TPOT_KV],
        remote_hbm=reading(Tier.REMOTE_HBM),
        cpu_dram=reading(Tier.CPU_DRAM),
        local_ssd=reading(Tier.LOCAL_SSD),
        object_store=reading(Tier.OBJECT_STORE),
    )
    errors = estimate.errors
    return LearnedRates(
        estimate.requests, rates, OVERHEAD_US * factors[Rate.OVERHEAD], errors[Kind.FIRST], errors[Kind.NEXT]
    )


def of_unknown(pool: Evidence, configured: EngineRates) -> EngineRates:
    """What a worker is taken for of which nothing is known: as fast as the pool's others were learned to be, and as fast as
    configured where they are slower. Dearer than those that are known it would never get a request, nor be known."""
    usual = learned_of(estimate_of(pool, configured), configured).rates
    return replace(
        configured,
        prefill_us_per_token=min(usual.prefill_us_per_token, configured.prefill_us_per_token),
        attention_us_per_token_pair=min(usual.attention_us_per_token_pair, configured.attention_us_per_token_pair),
        tpot_base_us=min(usual.tpot_base_us, configured.tpot_base_us),
        tpot_us_per_running=min(usual.tpot_us_per_running, configured.tpot_us_per_running),
        tpot_us_per_kv_token=min(usual.tpot_us_per_kv_token, configured.tpot_us_per_kv_token),
    )


def with_learned(profile: EngineProfile, learned: Mapping[str, LearnedRates], pool: Evidence) -> EngineProfile:
    """The profile with what was learned of these workers, which is the evidence of `pool`. Those that are alike (see ALIKE)
    in prefill, or in decoding, have the same rates there."""
    prefill = _alike({id: one.rates.prefill_us(*USUAL_PREFILL) for id, one in learned.items()})
    decode = _alike({id: one.rates.tpot_us(*USUAL_DECODE) for id, one in learned.items()})
    by_worker = {}
    for id, one in learned.items():
        computing, decoding = learned[prefill[id]].rates, learned[decode[id]].rates
        by_worker[id] = replace(
            one.rates,
            prefill_us_per_token=computing.prefill_us_per_token,
            attention_us_per_token_pair=computing.attention_us_per_token_pair,
            tpot_base_us=decoding.tpot_base_us,
            tpot_us_per_running=decoding.tpot_us_per_running,
            tpot_us_per_kv_token=decoding.tpot_us_per_kv_token,
        )
    unknown = of_unknown(pool, profile.rates)
    return replace(profile, rates=unknown, by_worker={**profile.by_worker, **by_worker})


def _alike(times_us: Mapping[str, float]) -> Mapping[str, str]:
    """For each worker the one that stands for it: the middle one of those that are alike."""
    groups: list[list[str]] = []
    for id in sorted(times_us, key=lambda id: (times_us[id], id)):
        if not groups or times_us[id] > times_us[groups[-1][0]] * (1 + ALIKE) / (1 - ALIKE):
            groups.append([])
        groups[-1].append(id)
    return {id: group[len(group) // 2] for group in groups for id in group}


def _piece_us(rate: ReadRate) -> float:
    return rate.setup_us + rate.us_per_mib * _USUAL_PIECE_BYTES / MIB_BYTES
