"""Which worker a request should go to: pure ranking of a pool by cost.

Candidates are the workers that may get a prompt now (alive, up, not decode-only), also those that hold nothing. A worker
that does not tell its load is taken to have the mean of those that do. Load comes last, because it is what routers book
that changes while they decide.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, overload

from kvatlas.cost.protocol import Load, TermKind
from kvatlas.request import DEFAULT_SLO, SelectionResult, Slo
from kvatlas.reservations import OfferEvaluation
from kvatlas.reservations.evaluation import worth_us
from kvatlas.reservations.limits import NO_ROOM, Over, level
from router_client.pricing.overlap import HeldPrefix
from router_client.pricing.pool import Pool
from router_client.pricing.quotes import Prospect, prospects
from router_client.prompt import Prompt

IN_FLIGHT = TermKind("in_flight", "tokens")
AGAIN = TermKind("again", "tokens")
SLO = TermKind("slo", "us missed")


def rank(
    prompt: Prompt, pool: Pool, held: Mapping[str, HeldPrefix], *, fingerprint: bytes = b""
) -> tuple[SelectionResult, ...]:
    """Every candidate with its cost by what workers report, cheapest first; ties in rendezvous order. Deterministic."""
    found = prospects(prompt, pool, held, fingerprint=fingerprint)
    return tuple(Ranked(found, [OfferEvaluation(p.candidate.load, p.candidate.load_known) for p in found]))


class Judging(NamedTuple):
    """What is added to a result's cost, and what it is held to: as the ask was (`kvatlas.reservations.Ask`)."""

    slo: Slo = DEFAULT_SLO
    again_factor: float = 0.0
    slo_factor: float = 0.0
    slo_filters: bool = False


JUDGING = Judging()


class Ranked(Sequence[SelectionResult]):
    """Prospects with their load, cheapest first.

    Where it is known which one is `chosen`, that is the first (the store's arithmetic may differ by a rounding), and the
    others are priced only when somebody looks at them: a router reads one of hundreds. Those that are left out for a
    limit come last.
    """

    __slots__ = ("_all", "_chosen", "_first", "_found", "_judging", "_weighed")

    def __init__(
        self,
        found: Sequence[Prospect],
        weighed: Sequence[OfferEvaluation],
        *,
        chosen: int | None = None,
        judging: Judging = JUDGING,
    ) -> None:
        self._found = found
        self._weighed = weighed
        self._chosen = chosen
        self._judging = judging
        self._first = None if chosen is None else self._price(chosen)
        self._all: tuple[SelectionResult, ...] | None = None

    @overload
    def __getitem__(self, index: int) -> SelectionResult: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[SelectionResult]: ...
    def __getitem__(self, index: int | slice) -> SelectionResult | Sequence[SelectionResult]:
        return self._first if index == 0 and self._first is not None else self._ranked()[index]

    def __len__(self) -> int:
        return len(self._found)

    def __iter__(self) -> Iterator[SelectionResult]:
        return iter(self._ranked())

    def __eq__(self, other: object) -> bool:
        return tuple(self) == tuple(other) if isinstance(other, Sequence) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def load_of(self, worker_id: str) -> Load | None:
        """The load that a worker was judged by; None for one that is no candidate."""
        return next((self._weighed[i].load for i, one in enumerate(self._found) if one.id == worker_id), None)

    def _ranked(self) -> tuple[SelectionResult, ...]:
        if self._all is None:
            results = [self._price(i) for i in range(len(self._found))]
            filters = self._judging.slo_filters
            levels = [level(result.over, slo_filters=filters) for result in results]
            order = sorted(range(len(results)), key=lambda i: (i != self._chosen, levels[i], results[i].score_us))
            self._all = tuple(results[i] for i in order)
        return self._all

    def _price(self, i: int) -> SelectionResult:
        return _result(self._found[i], self._weighed[i], self._judging)


def _result(found: Prospect, seen: OfferEvaluation, judging: Judging) -> SelectionResult:
    quote, cached = found.quote, found.cached_tokens
    predicted = seen.predicted_tokens - cached if seen.predicted_tokens else 0
    plan = found.plan(seen.load, predicted)
    cost = quote.profile.price(plan)
    if seen.wait_us:
        cost = cost.plus(IN_FLIGHT, seen.wait_us, predicted, delays=True)
    if seen.again_tokens:
        known = cached + predicted
        more_us = worth_us(quote.prices, known + seen.again_tokens) - worth_us(quote.prices, known)
        cost = cost.plus(AGAIN, judging.again_factor * more_us, seen.again_tokens)
    over = seen.over & NO_ROOM
    if cost.ttft_us is not None and cost.ttft_us > judging.slo.ttft_ms * 1_000:
        over |= Over.TTFT
    if cost.tpot_us is not None and plan.output_tokens and cost.tpot_us > judging.slo.tpot_ms * 1_000:
        over |= Over.TPOT
    if seen.missed_us and judging.slo_factor:
        cost = cost.plus(SLO, judging.slo_factor * seen.missed_us, round(seen.missed_us))
    for kind, us, amount in found.surcharges:
        cost = cost.plus(kind, us, amount)
    return SelectionResult(
        found.id,
        quote.required_blocks,
        found.own.tokens // quote.cut_tokens,
        found.own.tokens,
        found.usable,
        cost,
        found.source,
        found.transferred,
        seen.load_known,
        predicted,
        Over(over),
        plan=plan,
    )
