"""A router's probe: how much of a prompt each worker holds, what the prompt would cost there, and the choice.

The prompt takes the path of a client's request, up to the booking.
"""

import asyncio
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvatlas.blocks.token_text import parse_tokens
from kvatlas.request import SelectionResult
from kvatlas.status_page.content import (
    QUIET_DASH,
    Cell,
    Column,
    Section,
    Table,
    Tone,
    milliseconds_text,
    number_cell,
)
from kvatlas.status_page.probe import PromptKind, Query
from kvatlas.status_page.workers import blocks_cell
from kvatlas_router.disaggregation.pair_booker import Booked, PairBooker
from kvatlas_router.ejection.avoidance import Avoidance
from kvatlas_router.proxy.request_router import RequestRouter
from kvatlas_router.tokens.prompt_reader import RequestPrompt
from kvatlas_router.tokens.text_request import Api, TextRequest
from router_client.overlap_result import PromptOverlap
from router_client.prefill_decode_result import PairChoice
from router_client.pricing.slo import Advice
from router_client.prompt import Prompt
from router_client.results import Choice, Ranking

MOST_WORKERS = 48
"""Maximum number of rows per table."""

_HOLDERS = (
    Column("worker"),
    Column("resident blocks", number=True),
    Column("resident tokens", number=True),
    Column("by tier", hint="tokens, each once, in its nearest tier"),
    Column("usable tokens", hint="that its engine will reuse"),
    Column("remark"),
)


class PromptProbe:
    """See the module's docstring."""

    def __init__(self, parts: RequestRouter, pairs: PairBooker) -> None:
        self._client = parts.client
        self._reader = parts.reader
        self._catalogue = parts.catalogue
        self._avoidance = Avoidance(parts.ejections, parts.catalogue.workers_of)
        self._pairs = pairs

    async def models(self) -> Mapping[str, str]:
        """Models and adapters by name."""
        return {str(card["id"]): str(card["id"]) for card in await self._catalogue.cards()}

    async def answer(self, query: Query) -> Section:
        request = await asyncio.to_thread(_request_of, query)
        read = await self._reader.read(request)
        prompt = read.prompt.of_tenant(query.tenant) if query.tenant else read.prompt
        overlap = await self._client.overlap(prompt)
        choice = await self._avoidance.choose(
            prompt, frozenset(), lambda avoided: self._pairs.book(prompt, request, avoided, dry_run=True)
        )
        lines = [_headline(choice), *_remarks(read, choice)]
        return Section(
            "answer", "Who holds it, and who would get it", await self._tables(prompt, choice, overlap), lines
        )

    async def _tables(self, prompt: Prompt, choice: Booked, overlap: PromptOverlap) -> list[Table]:
        holders = _holders_table(overlap)
        if isinstance(choice, PairChoice) and choice.prefill is not None:
            return [
                _costs_table(
                    "What each would cost as the prefill worker", choice.prefill.ranking, choice.prefill.worker_id
                ),
                _costs_table("What each would cost as the decode worker", choice.decode.ranking, choice.worker_id),
                holders,
            ]
        assert isinstance(choice, Choice)
        whole = await self._client.rank(prompt) if choice.ranking.unread else choice.ranking
        return [_costs_table("What each would cost", whole, choice.worker_id), holders]


def _request_of(query: Query) -> TextRequest:
    """The request that a client would send. Raises InvalidValue."""
    body: dict[str, Any] = {"model": query.model} if query.model else {}
    if query.kind is PromptKind.CHAT:
        body["messages"] = [{"role": "user", "content": query.prompt}]
        return TextRequest.parse(Api.CHAT, json.dumps(body).encode())
    body["prompt"] = parse_tokens(query.prompt) if query.kind is PromptKind.TOKENS else query.prompt
    return TextRequest.parse(Api.COMPLETIONS, json.dumps(body).encode())


def _headline(choice: Booked) -> Cell:
    name = choice.worker_id
    if isinstance(choice, PairChoice) and choice.prefill is not None:
        name = f"{choice.prefill.worker_id} for the prompt and {choice.worker_id} for the answer"
    within = f", first token in {milliseconds_text(choice.ttft_us)}" if choice.ttft_us is not None else ""
    cached = f"{choice.predicted_cached_tokens:,} prompt tokens cached"
    return Cell(f"{name} would be chosen: {cached}{within}.", Tone.GOOD)


def _remarks(read: RequestPrompt, choice: Booked) -> Iterable[Cell]:
    ranking = (choice.decode if isinstance(choice, PairChoice) else choice).ranking
    if read.prompt_tokens is None:
        why = (
            f"The prompt's token ids are not known ({read.untokenized}): its length is a guess, and it matches nothing."
        )
        yield Cell(why, Tone.WARNING)
    else:
        yield Cell(f"The prompt has {read.prompt_tokens:,} tokens.")
    if isinstance(choice, Choice) and choice.why:
        yield Cell(f"Chosen by {choice.mode.replace('_', ' ')}: {choice.why}.", Tone.WARNING)
    for remark in ranking.remarks:
        yield Cell(remark, Tone.WARNING)
    if choice.advice is not Advice.GO:
        yield Cell(f"Advice: {choice.advice.value}; every candidate has no room or misses the SLO.", Tone.WARNING)


def _costs_table(title: str, ranking: Ranking, chosen: str) -> Table:
    """A table of the costs, with a column for each term that is not zero for at least one worker."""
    results = list(ranking.results[:MOST_WORKERS])
    if all(result.worker_id != chosen for result in results):
        results = [*(one for one in ranking.results if one.worker_id == chosen), *results]
    terms = list(dict.fromkeys(term.name for result in results for term in result.terms if term.us))
    columns = [
        Column("worker"),
        Column("usable tokens", number=True),
        Column("predicted more", number=True, hint="being computed there, or computed by an engine without events"),
        *(Column(f"{name.replace('_', ' ')}, ms", number=True) for name in terms),
        Column("cost, ms", number=True, hint="the sum of its terms; the cheapest is chosen"),
        Column("first token", number=True, hint="predicted time to it"),
        Column("remark"),
    ]
    rows = [_cost_row(result, terms, is_chosen=result.worker_id == chosen) for result in results]
    between = [QUIET_DASH] * (len(columns) - 2)
    out = list(ranking.left_out.items())[: max(0, MOST_WORKERS - len(rows))]
    rows += [
        [Cell(worker_id, Tone.QUIET), *between, Cell(f"no candidate: {why}", Tone.QUIET)] for worker_id, why in out
    ]
    left = len(ranking.results) + ranking.unread + len(ranking.left_out) - len(rows)
    note = f"{left} more workers are not shown" if left > 0 else ""
    return Table(columns, rows, "no candidate", note, title).without_empty("predicted more", "remark")


def _cost_row(result: SelectionResult, terms: Sequence[str], *, is_chosen: bool) -> list[Cell]:
    by_name = {term.name: term for term in result.terms}
    costs = [
        _ms_cell(term.us, f"{term.amount:,} {term.unit}") if (term := by_name.get(name)) is not None else QUIET_DASH
        for name in terms
    ]
    remarks = [f"reads {result.transferred_tokens:,} tokens from {result.source}"] if result.source is not None else []
    remarks += [result.why, result.upper_bound, ", ".join(result.over.names)]
    remarks += [] if result.load_known else ["load unknown: the pool's mean"]
    return [
        Cell(result.worker_id, Tone.GOOD if is_chosen else Tone.PLAIN, "chosen" if is_chosen else "", marked=is_chosen),
        number_cell(result.usable_tokens),
        number_cell(result.predicted_tokens),
        *costs,
        _ms_cell(result.score_us),
        QUIET_DASH if result.cost.ttft_us is None else Cell(milliseconds_text(result.cost.ttft_us)),
        Cell("; ".join(filter(None, remarks))),
    ]


def _ms_cell(us: int, hint: str = "") -> Cell:
    return Cell(f"{us / 1e3:,.1f}", Tone.QUIET if not us else Tone.PLAIN, hint)


def _holders_table(overlap: PromptOverlap) -> Table:
    rows = [
        [
            Cell(worker.worker_id),
            Cell(f"{worker.resident_blocks:,} of {worker.required_blocks:,}"),
            number_cell(worker.resident_tokens),
            blocks_cell(worker.tokens_by_tier) if worker.tokens_by_tier else QUIET_DASH,
            Cell(
                f"{'at most ' if worker.upper_bound else ''}{worker.usable_tokens:,}",
                share=min(1.0, worker.usable_tokens / overlap.input_tokens) if overlap.input_tokens else None,
            ),
            Cell("; ".join(filter(None, (worker.why, worker.upper_bound))), Tone.QUIET),
        ]
        for worker in overlap.workers[:MOST_WORKERS]
    ]
    left = len(overlap.workers) - len(rows)
    note = f"{left} more workers hold no more than these" if left else ""
    return Table(_HOLDERS, rows, "no worker serves this model", note, "Who holds how much").without_empty("remark")
