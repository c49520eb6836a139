"""The sections of a router's status page: its recent decisions, the fleet's workers, and the probe."""

import time
from collections.abc import Mapping, Sequence

from redis.exceptions import RedisError

from kvatlas.fleet.records import FleetRecord
from kvatlas.quantities import count_text
from kvatlas.status_page.content import (
    QUIET_DASH,
    Bars,
    Cell,
    Column,
    Fact,
    Section,
    Table,
    Tone,
    milliseconds_text,
    number_cell,
)
from kvatlas.status_page.server import Source, StatusPage
from kvatlas.status_page.workers import ago_cell, workers_fact, workers_section
from kvatlas_router.proxy.exchange import Exchange
from kvatlas_router.proxy.request_router import RequestRouter
from kvatlas_router.status_page.prompt_probe import PromptProbe
from router_client.basis import Basis
from router_client.decision.history import STEP_S, STEPS, DecisionHistory, PastDecision, Tally

MOST_WORKERS = 32
MINUTES = round(STEPS * STEP_S / 60)

_BY_WORKER = (
    Column("worker"),
    Column("decisions", number=True),
    Column("share"),
    Column("prompt tokens", number=True),
    Column("predicted cached", hint="of the prompt tokens"),
    Column("found cached", hint="of the prompt tokens, as the engine's answers report"),
    Column("without index", number=True, hint="chosen by load or by the prefix alone"),
)
_LAST = (
    Column("when", number=True),
    Column("worker"),
    Column("model"),
    Column("prompt tokens", number=True),
    Column("predicted cached"),
    Column("first token in", number=True, hint="as predicted"),
    Column("by", hint="what the worker was chosen by"),
)


def router_page(parts: RequestRouter, exchange: Exchange, probe: PromptProbe) -> StatusPage:
    known: Mapping[str, FleetRecord] = {}

    async def decisions() -> Section:
        return decisions_section(parts.client.history)

    async def workers() -> Section:
        nonlocal known
        known = await parts.fleet.all()
        return await workers_section(known, parts.index.digest)

    def facts() -> Sequence[Fact]:
        return [workers_fact(known), *_facts(parts, exchange)]

    title = f"Decisions of the last {MINUTES} minutes"
    sources = [Source("decisions", title, decisions), Source("workers", "Workers", workers)]
    return StatusPage("router", lambda: parts.client.router_id, facts, sources, probe, (RedisError,))


def decisions_section(history: DecisionHistory) -> Section:
    by_worker = history.by_worker()
    total = sum(tally.choices for tally in by_worker.values())
    order = sorted(by_worker.items(), key=lambda one: (-one[1].choices, one[0]))
    rows = [_tally_row(worker_id, tally, total) for worker_id, tally in order[:MOST_WORKERS]]
    left = len(order) - len(rows)
    note = f"{count_text(left, 'more worker')} with fewer decisions" if left else ""
    now_us = time.time_ns() // 1_000
    last = [_last_row(decision, now_us) for decision in reversed(history.last)]
    steps = history.by_step()
    texts = [f"{count_text(count, 'decision')}, {round((STEPS - i) * STEP_S)} s ago" for i, count in enumerate(steps)]
    bars = Bars(f"Decisions in each {STEP_S:g} s, the present at the right", list(zip(steps, texts, strict=True)))
    none = f"no decision in the last {MINUTES} minutes"
    tables = [
        Table(_BY_WORKER, rows, none, note, "By worker"),
        Table(_LAST, last, "none yet", title=f"The last {len(last)}", folded=True),
    ]
    return Section("decisions", f"Decisions of the last {MINUTES} minutes", tables, bars=bars if total else None)


def _tally_row(worker_id: str, tally: Tally, total: int) -> Sequence[Cell]:
    return [
        Cell(worker_id),
        number_cell(tally.choices),
        _share_cell(tally.choices, total),
        number_cell(tally.prompt_tokens),
        _share_cell(tally.cached_tokens, tally.prompt_tokens),
        _share_cell(tally.found_tokens, tally.answer_tokens),
        number_cell(tally.without_index, Tone.WARNING if tally.without_index else Tone.PLAIN),
    ]


def _last_row(decision: PastDecision, now_us: int) -> Sequence[Cell]:
    by_cost = decision.basis == Basis.COST
    basis = decision.basis.replace("_", " ")
    return [
        ago_cell(decision.at_us, now_us),
        Cell(decision.worker_id),
        Cell(decision.model_id),
        number_cell(decision.prompt_tokens),
        _share_cell(decision.cached_tokens, decision.prompt_tokens),
        QUIET_DASH if decision.ttft_us is None else Cell(milliseconds_text(decision.ttft_us)),
        Cell(basis) if by_cost else Cell(f"{basis}: {decision.why}" if decision.why else basis, Tone.WARNING),
    ]


def _share_cell(part: int, whole: int) -> Cell:
    """A percentage with its bar; a dash if the whole is zero."""
    return Cell(f"{part / whole:.0%}", share=min(1.0, part / whole)) if whole else QUIET_DASH


def _facts(parts: RequestRouter, exchange: Exchange) -> Sequence[Fact]:
    counters, ejected, stalled = parts.client.counters, parts.ejections.ejected(), parts.progress.stalled()
    late_s = counters.decision_time.quantile(0.99)
    saved = f"{counters.saved_tokens / counters.prompt_tokens:.0%}" if counters.prompt_tokens else None
    facts = [
        Fact("in flight", number_cell(exchange.in_flight)),
        Fact("waiting", number_cell(exchange.waiting, Tone.WARNING if exchange.waiting else Tone.PLAIN)),
        Fact("waiting, all routers", number_cell(exchange.pool_waiting)),
        Fact("decisions since the start", number_cell(counters.routed)),
        Fact("decision, p99", QUIET_DASH if late_s is None else Cell(milliseconds_text(late_s * 1e6))),
        Fact("prompt tokens not computed", QUIET_DASH if saved is None else Cell(saved)),
    ]
    for name, workers, why in (
        ("ejected workers", ejected, "they fail while others answer"),
        ("stalled workers", stalled, "their engines have work but make no progress"),
    ):
        if workers:
            facts.append(Fact(name, Cell(f"{len(workers)}: {', '.join(sorted(workers))}", Tone.BAD, why)))
    return facts
