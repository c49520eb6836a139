"""Ranks a pool's candidates by cost: quotes with load added. Pure.

Candidates are the workers that may get a prompt now (alive, up, not decode-only), including those that hold nothing. A
worker whose load is unknown is assumed to have the mean load of the others. Load is added last, because routers' bookings
change it while they decide.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, overload

from kvatlas.cost.protocol import Load, TermKind, mean_load
from kvatlas.request import DEFAULT_SLO, SelectionResult, Slo
from kvatlas.reservations import OfferEvaluation
from kvatlas.reservations.evaluation import interference_us, left_us, worth_us
from kvatlas.reservations.room_and_slo import NO_ROOM, NOTHING, Over, level
from router_client.pricing.lookups import MemberQuotes
from router_client.pricing.overlap import HeldPrefix
from router_client.pricing.pool import Pool
from router_client.pricing.quote_desk import quote_candidates
from router_client.pricing.quotes import Quote
from router_client.pricing.reuse_limit import describe_bound, why_not_found
from router_client.prompt import Prompt

IN_FLIGHT = TermKind("in_flight", "tokens")
AGAIN = TermKind("again", "tokens")
INTERFERENCE = TermKind("interference", "running requests")
SLO = TermKind("slo", "us missed")


def rank(
    prompt: Prompt, pool: Pool, held: Mapping[str, HeldPrefix], *, fingerprint: bytes = b""
) -> tuple[SelectionResult, ...]:
    """Every candidate with its cost under reported load, cheapest first; ties in rendezvous order. Deterministic."""
    quotes = quote_candidates(prompt, pool, held, fingerprint=fingerprint)
    loads = [pool.loads[quote.id] for quote in quotes]
    mean = mean_load([load for load in loads if load is not None])
    return tuple(RankedResults(quotes, [OfferEvaluation(load or mean, load is not None) for load in loads]))


class Criteria(NamedTuple):
    """The factors for a result's additional terms, and the SLO against which it is checked, as in the ask
    (`kvatlas.reservations.Ask`)."""

    slo: Slo = DEFAULT_SLO
    again_factor: float = 0.0
    interference_factor: float = 0.0
    slo_factor: float = 0.0
    slo_filters: bool = False


DEFAULT_CRITERIA = Criteria()


class RankedResults(Sequence[SelectionResult]):
    """Quotes with their load, cheapest first; quotes that exceed a limit that excludes workers come last.

    If the `chosen` one is known, it comes first (the store may round differently), and the others are priced only when they
    are read, because a router reads just one of hundreds.
    """

    __slots__ = ("_all", "_by_offer", "_chosen", "_criteria", "_first", "_quotes")

    def __init__(
        self,
        quotes: Sequence[Quote],
        by_offer: Sequence[OfferEvaluation],
        *,
        chosen: int | None = None,
        criteria: Criteria = DEFAULT_CRITERIA,
    ) -> None:
        self._quotes = quotes
        self._by_offer = by_offer
        self._chosen = chosen
        self._criteria = criteria
        self._first = None if chosen is None else self._price(chosen)
        self._all: tuple[SelectionResult, ...] | None = None

    @overload
    def __getitem__(self, index: int) -> SelectionResult: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[SelectionResult]: ...
    def __getitem__(self, index: int | slice) -> SelectionResult | Sequence[SelectionResult]:
        return self._first if index == 0 and self._first is not None else self._price_all()[index]

    def __len__(self) -> int:
        return len(self._quotes)

    def __iter__(self) -> Iterator[SelectionResult]:
        return iter(self._price_all())

    def __eq__(self, other: object) -> bool:
        return tuple(self) == tuple(other) if isinstance(other, Sequence) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def load_of(self, worker_id: str) -> Load | None:
        """The load with which a worker was priced; None for a worker that is not a candidate."""
        if self._first is not None and self._first.worker_id == worker_id and self._first.plan is not None:
            return self._first.plan.load
        if isinstance(self._quotes, MemberQuotes):
            number = self._quotes.number_of(worker_id)
        else:
            number = next((i for i, quote in enumerate(self._quotes) if quote.id == worker_id), None)
        return None if number is None else self._by_offer[number].load

    def _price_all(self) -> tuple[SelectionResult, ...]:
        if self._all is None:
            results = [self._price(i) for i in range(len(self._quotes))]
            filters = self._criteria.slo_filters
            levels = [level(result.over, slo_filters=filters) for result in results]
            order = sorted(range(len(results)), key=lambda i: (i != self._chosen, levels[i], results[i].score_us))
            self._all = tuple(results[i] for i in order)
        return self._all

    def _price(self, i: int) -> SelectionResult:
        return _price_with_load(self._quotes[i], self._by_offer[i], self._criteria)


def _price_with_load(quote: Quote, evaluated: OfferEvaluation, criteria: Criteria) -> SelectionResult:
    for_kind, cached = quote.for_kind, quote.cached_tokens
    predicted = evaluated.predicted_tokens - cached if evaluated.predicted_tokens else 0
    plan = quote.plan(evaluated.load, predicted)
    cost = for_kind.profile.price(plan)
    if evaluated.wait_us:
        cost = cost.plus(IN_FLIGHT, evaluated.wait_us, predicted, delays=True)
    if evaluated.again_tokens:
        known = cached + predicted
        more_us = worth_us(for_kind.prices, known + evaluated.again_tokens) - worth_us(for_kind.prices, known)
        cost = cost.plus(AGAIN, criteria.again_factor * more_us, evaluated.again_tokens)
    work_us = left_us(for_kind.prices, quote.work_us, cached, cached + predicted)
    running = evaluated.load.running_decodes
    delay_us = interference_us(for_kind.interference(criteria.interference_factor), work_us, running)
    if delay_us:
        cost = cost.plus(INTERFERENCE, delay_us, running)
    over = evaluated.over & NO_ROOM if evaluated.over else 0
    if cost.ttft_us is not None and cost.ttft_us > criteria.slo.ttft_ms * 1_000:
        over |= Over.TTFT
    if cost.tpot_us is not None and plan.output_tokens and cost.tpot_us > criteria.slo.tpot_ms * 1_000:
        over |= Over.TPOT
    if evaluated.missed_us and criteria.slo_factor:
        cost = cost.plus(SLO, criteria.slo_factor * evaluated.missed_us, round(evaluated.missed_us))
    for surcharge in quote.surcharges:
        cost = cost.plus(*surcharge)
    return SelectionResult(
        quote.id,
        for_kind.required_blocks,
        quote.held.tokens // for_kind.block_tokens,
        quote.held.tokens,
        quote.usable_tokens,
        cost,
        quote.source,
        quote.transferred_tokens,
        evaluated.load_known,
        predicted,
        Over(over) if over else NOTHING,
        plan=plan,
        reads_store=quote.reads_store,
        upper_bound=describe_bound(quote.candidate.endpoint, quote.candidate.rule),
        why="" if quote.held.tokens else why_not_found(for_kind.prompt, quote.candidate.endpoint),
    )
