"""The probe of an indexer: how much of a prompt each worker holds. Costs and choices are up to routers."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from kvatlas.blocks.hashing import extend_chain, lookahead_chain, thin
from kvatlas.blocks.residency import Overlap
from kvatlas.blocks.reuse import ReuseRules
from kvatlas.blocks.tiers import Tier, tiers_of
from kvatlas.blocks.token_text import parse_tokens
from kvatlas.errors import InvalidValue
from kvatlas.fleet.records import EngineEndpoint, FleetRecord
from kvatlas.fleet_store.fleet_store import FleetStore
from kvatlas.identity import DEFAULT_TENANT, OWN_CHAIN, Scope
from kvatlas.index.protocol import ResidencyIndex
from kvatlas.status_page.content import QUIET_DASH, Cell, Column, Section, Table, Tone, number_cell
from kvatlas.status_page.probe import PromptKind, Query
from kvatlas.status_page.workers import MOST_WORKERS, blocks_cell, state_cell

_COLUMNS = (
    Column("worker"),
    Column("state"),
    Column("resident blocks", number=True),
    Column("resident tokens", number=True),
    Column("by tier", hint="tokens, each once, in its nearest tier"),
    Column("usable tokens", number=True, hint="that its engine will reuse: it computes at least the last token"),
)


class _Shape(NamedTuple):
    """Workers of one shape are looked up with the same hashes."""

    block_size: int
    granularity: int
    lookahead_tokens: int


class _Held(NamedTuple):
    record: FleetRecord
    tokens: int
    usable: int
    by_tier: Mapping[Tier, int]


class OverlapProbe:
    """Answers overlap queries from the index that this replica writes."""

    kinds: Sequence[PromptKind] = (PromptKind.TOKENS,)
    asks_adapter = True

    def __init__(self, index: ResidencyIndex, fleet: FleetStore) -> None:
        self._index = index
        self._fleet = fleet
        self._rules = ReuseRules()

    async def models(self) -> Mapping[str, str]:
        """Models by pool id."""
        endpoints = [record.endpoint for record in (await self._fleet.all()).values()]
        names = {one.pool_id: _model_text(one) for one in endpoints}
        return dict(sorted(names.items(), key=lambda one: one[1]))

    async def answer(self, query: Query) -> Section:
        tokens = await asyncio.to_thread(parse_tokens, query.prompt)
        records = await self._fleet.all()
        pools = {record.endpoint.pool_id: record.endpoint for record in records.values()}
        endpoint = pools.get(query.model) or (next(iter(pools.values())) if len(pools) == 1 else None)
        if endpoint is None:
            raise InvalidValue(
                "no worker serves this model; choose one from the list" if pools else "no worker is published"
            )
        tenant = query.tenant or DEFAULT_TENANT
        scope = Scope(endpoint.model_id, endpoint.tokenizer_id, query.adapter or None, tenant)
        shapes: dict[_Shape, dict[str, FleetRecord]] = {}
        for worker_id, record in records.items():
            if record.endpoint.pool_id == scope.pool_id and (shape := _shape_of(record.endpoint)) is not None:
                shapes.setdefault(shape, {})[worker_id] = record
        held: dict[str, _Held] = {}
        for shape, workers in shapes.items():
            held.update(await self._look_up(scope, tokens, shape, workers))
        return _section(tokens, held)

    async def _look_up(
        self, scope: Scope, tokens: Sequence[int], shape: _Shape, workers: Mapping[str, FleetRecord]
    ) -> dict[str, _Held]:
        parent, behind = lookahead_chain(tokens, shape.lookahead_tokens)
        chain = await asyncio.to_thread(extend_chain, behind, shape.block_size, parent)
        hashes = thin(chain, shape.granularity)
        found = Overlap((), 0)
        if hashes:
            limit = (len(tokens) - 1) // shape.block_size if shape.granularity == 1 else None
            found = await self._index.overlap(scope, hashes, limit=limit)
        runs, reach = found.runs_by_worker(), found.reach()
        held = {}
        for worker_id, record in workers.items():
            by_tier: dict[Tier, int] = {}
            for blocks, flags in runs.get(worker_id, ()):
                nearest = tiers_of(flags)[0]
                by_tier[nearest] = by_tier.get(nearest, 0) + blocks * shape.block_size * shape.granularity
            resident = sum(by_tier.values())
            usable = self._rules.of(record.endpoint).usable_tokens(resident, len(tokens), shape.block_size)
            if worker_id in reach:
                usable = reach[worker_id] * shape.block_size
            held[worker_id] = _Held(record, resident, usable, by_tier)
        return held


def _shape_of(endpoint: EngineEndpoint) -> _Shape | None:
    """The shape of a worker's blocks; None if it has published none yet, or if they belong to another chain."""
    if not endpoint.block_size or endpoint.chain != OWN_CHAIN:
        return None
    return _Shape(endpoint.block_size, endpoint.granularity, endpoint.lookahead_tokens)


def _model_text(endpoint: EngineEndpoint) -> str:
    same = endpoint.model_id == endpoint.tokenizer_id
    return endpoint.model_id if same else f"{endpoint.model_id}, tokenizer {endpoint.tokenizer_id}"


def _section(tokens: Sequence[int], held: Mapping[str, _Held]) -> Section:
    order = sorted(held.items(), key=lambda one: (-one[1].usable, -one[1].tokens, one[0]))
    holders = sum(one.tokens > 0 for one in held.values())
    line = f"{holders} of {len(held)} workers hold the start of this prompt of {len(tokens):,} tokens."
    rows = [_row(worker_id, one, len(tokens)) for worker_id, one in order[:MOST_WORKERS]]
    left = len(order) - len(rows)
    note = f"{left} more workers hold no more than these" if left else ""
    lines = [Cell(line, Tone.GOOD if holders else Tone.WARNING)]
    return Section(
        "answer",
        "Who holds it",
        [Table(_COLUMNS, rows, "no worker of this model has published blocks yet", note)],
        lines,
    )


def _row(worker_id: str, held: _Held, prompt_tokens: int) -> list[Cell]:
    endpoint, record = held.record.endpoint, held.record
    size = endpoint.block_size or 1
    kind = Cell("store", Tone.QUIET, "a shared store: it gets no requests") if endpoint.is_store else None
    return [
        Cell(worker_id),
        kind or state_cell(record.state, record.liveness, record.doubt),
        Cell(f"{held.tokens // size:,} of {-(-prompt_tokens // size):,}"),
        number_cell(held.tokens),
        blocks_cell(held.by_tier) if held.by_tier else QUIET_DASH,
        Cell(f"{held.usable:,}", hint=endpoint.upper_bound, share=held.usable / prompt_tokens),
    ]
