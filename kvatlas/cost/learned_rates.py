"""Learns the rates of the profile `engine` from finished requests: turns a request into rows, and an estimate into rates.

An answer in one piece gives no rows unless it is a single token, because its decoding time can't be separated from interleaved
prefills of other requests.

The units are the documented defaults of `EngineRates` (`kvatlas/cost/engine.py`); for transfers, they are the time that the
pieces would take to read at the default rates. Evidence therefore means the same to routers with different configurations.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Final, TypeGuard

from kvatlas.blocks.tiers import Tier
from kvatlas.cost.engine import EngineProfile, EngineRates
from kvatlas.cost.protocol import MIB_BYTES, Load, Piece, Plan, ReadRate
from kvatlas.cost.regression import RATES, Estimate, Evidence, Latency, Rate, Row, Vector
from kvatlas.dataclass import dataclass

UNITS: Final = EngineRates()
OVERHEAD_US: Final = 5_000.0
"""Unit of the overhead before any first token: the network, scheduling, and the step in progress. The overhead is learned so
that it does not count as prefill; no price includes it."""

MAX_QUEUED_SHARE: Final = 0.5
"""A request that found more queued tokens than this share of its own gives no prefill row, because it is unknown how much of
the first request in the queue had already been computed."""
LONGEST_US: Final = 3.6e9

SAME_SPEED: Final = 0.1
"""Workers whose times are within this share of their median count as equally fast. Rates are not known more precisely than
that, and the worker that seemed a little faster would get most of the requests."""
TYPICAL_PREFILL: Final = (1_024, 1_024)
TYPICAL_DECODE: Final = (8, 16_384)
"""The new and cached tokens, and the running requests and KV tokens, for which workers are compared."""
_TYPICAL_PIECE_BYTES: Final = 16 * MIB_BYTES
_RATE_OF: Final = {
    Tier.HBM: Rate.REMOTE_HBM,  # the HBM of another worker
    Tier.REMOTE_HBM: Rate.REMOTE_HBM,
    Tier.CPU_DRAM: Rate.CPU_DRAM,
    Tier.LOCAL_SSD: Rate.LOCAL_SSD,
    Tier.OBJECT_STORE: Rate.OBJECT_STORE,
}


@dataclass(frozen=True, slots=True)
class FinishedRequest:
    """A request that ended well. A field is None if it is unknown or was not measured.

    `plan`: as priced when the worker was chosen. `load_known`: the plan's load is what the worker reports. `waited`: the
    request also had to wait for a prefix that was being computed. `load_after`: the worker's load at the end, including this
    request. `prompt_tokens`, `cached_tokens` (those not computed) and `output_tokens`: as the engine reported them. `ttft_us`:
    the time from sending the request to its first token. `tpot_us`: the median time from one token to the next; the mean would
    include interleaved prefills of other requests.
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


def rows_of(request: FinishedRequest) -> tuple[Row, ...]:
    """The rows that a request provides. Empty if they would be unreliable: the load is unknown, too much was queued before the
    request, there are no tokens, or the times are impossible."""
    if not request.load_known or request.prompt_tokens <= 0 or request.output_tokens <= 0:
        return ()
    rows = []
    ttft = _ttft_terms(request)
    if ttft is not None and _is_possible(request.ttft_us):
        terms, apart_us = ttft
        rows.append(Row(Latency.TTFT, request.ttft_us - apart_us, terms))
    if request.output_tokens > 1 and _is_possible(request.tpot_us):
        rows.append(Row(Latency.TPOT, request.tpot_us, _tpot_terms(request)))
    return tuple(row for row in rows if row.us > 0)


def _ttft_terms(request: FinishedRequest) -> tuple[Vector, float] | None:
    """The terms of the time to the first token, and the part of that time (in us) that is not learned; None if they are
    unknown."""
    plan, load = request.plan, request.plan.load
    moved = [piece for piece in plan.pieces if not piece.at_hand]
    cached = request.cached_tokens
    if cached is None and request.prompt_tokens == plan.input_tokens:
        cached = plan.cached_tokens
    if cached is None or not 0 <= cached < request.prompt_tokens or request.waited or load.waiting_requests:
        return None
    if moved and cached != plan.cached_tokens:  # we can't tell what was read
        return None
    new = request.prompt_tokens - cached
    if load.queued_prefill_tokens > MAX_QUEUED_SHARE * new:
        return None
    terms = [0.0] * RATES
    terms[Rate.OVERHEAD] = OVERHEAD_US
    terms[Rate.PREFILL] = UNITS.prefill_us_per_token * (new + load.queued_prefill_tokens)
    terms[Rate.ATTENTION] = UNITS.prefill_us(new, cached) - UNITS.prefill_us_per_token * new
    apart_us = 0.0
    for piece in moved:
        own_us, network_us, domain_us = _read_us(piece)
        terms[_RATE_OF[piece.price_tier]] += own_us
        terms[Rate.REMOTE_HBM] += network_us
        apart_us += domain_us
    return tuple(terms), apart_us


def _read_us(piece: Piece) -> tuple[float, float, float]:
    """The time that it takes to read a piece at unit rates: in its tier, in the network, and the part that is not learned
    (crossing to another domain, or the whole piece if its holder states its own rate)."""
    if piece.rate is not None:
        return 0.0, 0.0, UNITS.read_us(piece)
    mib = (piece.bytes or piece.tokens * UNITS.kv_bytes_per_token) / MIB_BYTES
    rate = UNITS.read_rate(piece.price_tier)
    own_us = rate.setup_us + rate.us_per_mib * mib
    crosses = not piece.own and piece.price_tier is not Tier.REMOTE_HBM
    network_us = UNITS.remote_hbm.us_per_mib * mib if crosses else 0.0
    return own_us, network_us, UNITS.read_us(piece) - own_us - network_us


def _tpot_terms(request: FinishedRequest) -> Vector:
    """The terms of the time from one token to the next, for the mean of the load at the request's start and end."""
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


def _is_possible(us: float | None) -> TypeGuard[float]:
    return us is not None and 0 < us < LONGEST_US


@dataclass(frozen=True, slots=True)
class LearnedRates:
    """A worker's rates, learned from a number of requests. `overhead_us`: see OVERHEAD_US. `first_error` and `next_error`: the
    typical relative error of recent times to the first token, and of recent times from token to token."""

    requests: int
    rates: EngineRates
    overhead_us: float
    first_error: float
    next_error: float


def prior_of(configured: EngineRates) -> Vector:
    """The configured rates, as multiples of the units."""
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
    """The estimate from this evidence, with the configured rates as the prior."""
    return Estimate.of(evidence, prior_of(configured))


def learned_rates_of(estimate: Estimate, configured: EngineRates) -> LearnedRates:
    """Turn an estimate into rates. The ratio of set-up time to bandwidth of a transfer stays as configured."""
    factors, prior = estimate.factors, prior_of(configured)

    def scaled(tier: Tier) -> ReadRate:
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
        remote_hbm=scaled(Tier.REMOTE_HBM),
        cpu_dram=scaled(Tier.CPU_DRAM),
        local_ssd=scaled(Tier.LOCAL_SSD),
        object_store=scaled(Tier.OBJECT_STORE),
    )
    errors = estimate.errors
    return LearnedRates(
        estimate.requests, rates, OVERHEAD_US * factors[Rate.OVERHEAD], errors[Latency.TTFT], errors[Latency.TPOT]
    )


def rates_of_unknown(pool: Evidence, configured: EngineRates) -> EngineRates:
    """Rates for a pool's workers as long as none of their rates is known: those learned for the pool, or the configured ones if
    these are faster."""
    learned = learned_rates_of(estimate_of(pool, configured), configured).rates
    return replace(
        configured,
        prefill_us_per_token=min(learned.prefill_us_per_token, configured.prefill_us_per_token),
        attention_us_per_token_pair=min(learned.attention_us_per_token_pair, configured.attention_us_per_token_pair),
        tpot_base_us=min(learned.tpot_base_us, configured.tpot_base_us),
        tpot_us_per_running=min(learned.tpot_us_per_running, configured.tpot_us_per_running),
        tpot_us_per_kv_token=min(learned.tpot_us_per_kv_token, configured.tpot_us_per_kv_token),
    )


def with_learned_rates(profile: EngineProfile, learned: Mapping[str, LearnedRates], pool: Evidence) -> EngineProfile:
    """The profile with the learned rates of these workers, which come from the evidence of `pool`. Workers that are equally
    fast (see SAME_SPEED) at prefill or at decoding get the same rates for it.

    A worker without evidence is assumed to be as fast as the fastest known one. If it looked slower, it might never get a
    request, and never become known; if it looked faster, it would get all requests until the first of them ended.
    """
    prefill_us = {id: one.rates.prefill_us(*TYPICAL_PREFILL) for id, one in learned.items()}
    decode_us = {id: one.rates.tpot_us(*TYPICAL_DECODE) for id, one in learned.items()}
    prefill, decode = _representatives(prefill_us), _representatives(decode_us)
    shared: dict[EngineRates, EngineRates] = {}  # equal rates are the same object: workers that share it are alike

    def combined(rates: EngineRates, computing: str, decoding: str) -> EngineRates:
        """These rates, with the prefill rates of one worker's representative and the decode rates of another's."""
        computed, decoded = learned[prefill[computing]].rates, learned[decode[decoding]].rates
        found = replace(
            rates,
            prefill_us_per_token=computed.prefill_us_per_token,
            attention_us_per_token_pair=computed.attention_us_per_token_pair,
            tpot_base_us=decoded.tpot_base_us,
            tpot_us_per_running=decoded.tpot_us_per_running,
            tpot_us_per_kv_token=decoded.tpot_us_per_kv_token,
        )
        return shared.setdefault(found, found)

    by_worker = {id: combined(one.rates, id, id) for id, one in learned.items()}
    unknown = rates_of_unknown(pool, profile.rates)
    if learned:
        fastest = (
            min(prefill_us, key=lambda id: (prefill_us[id], id)),
            min(decode_us, key=lambda id: (decode_us[id], id)),
        )
        unknown = combined(profile.rates, *fastest)
    return replace(profile, rates=unknown, by_worker={**profile.by_worker, **by_worker})


def _representatives(times_us: Mapping[str, float]) -> Mapping[str, str]:
    """Map each worker to the one whose rates it gets: the middle one of the workers that are equally fast."""
    groups: list[list[str]] = []
    for id in sorted(times_us, key=lambda id: (times_us[id], id)):
        if not groups or times_us[id] > times_us[groups[-1][0]] * (1 + SAME_SPEED) / (1 - SAME_SPEED):
            groups.append([])
        groups[-1].append(id)
    return {id: group[len(group) // 2] for group in groups for id in group}


def _piece_us(rate: ReadRate) -> float:
    return rate.setup_us + rate.us_per_mib * _TYPICAL_PIECE_BYTES / MIB_BYTES
