"""Results of the router client: overlaps, rankings and choices, each with `explain()`."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field
from itertools import islice
from math import ceil
from typing import Any, TypeVar, overload

from kvatlas.cost.protocol import Cost
from kvatlas.dataclass import dataclass
from kvatlas.fleet.records import EngineEndpoint, EngineKind, Role
from kvatlas.request import DEFAULT_SLO, SelectionResult, Slo
from kvatlas.reservations import Outcome
from kvatlas.reservations.room_and_slo import Over
from router_client.basis import Basis
from router_client.booking.reservation import Reservation
from router_client.learning.rates import Feedback
from router_client.learning.timings import Timings
from router_client.learning.token_counts import Usage
from router_client.pricing.fetch_fields import Fetch
from router_client.pricing.slo import Advice, advise, earliest_ttft_us
from router_client.settings import LimitSettings

T = TypeVar("T")

RANK_HEADER = "X-Data-Parallel-Rank"
MOST_NAMED = 16
"""Maximum number of left-out workers that a text lists; the data contains all of them."""


def headers_for(worker: EngineEndpoint) -> dict[str, str]:
    """The headers that a request to this worker needs; they name the rank of a data-parallel engine."""
    return {} if worker.dp_rank is None else {RANK_HEADER: str(worker.dp_rank)}


class LazySequence(Sequence[T]):
    """A sequence whose items are built on first access: a router that needs only the best of hundreds does not have to
    build all of them."""

    __slots__ = ("_items", "_make")

    def __init__(self, make: Callable[[], tuple[T, ...]]) -> None:
        self._make = make
        self._items: tuple[T, ...] | None = None

    @property
    def items(self) -> tuple[T, ...]:
        if self._items is None:
            self._items = self._make()
        return self._items

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[T]: ...
    def __getitem__(self, index: int | slice) -> T | Sequence[T]:
        return self.items[index]

    def __len__(self) -> int:
        return len(self.items)

    def __iter__(self) -> Iterator[T]:
        return iter(self.items)

    def __eq__(self, other: object) -> bool:
        return self.items == tuple(other) if isinstance(other, Sequence) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(self.items)


@dataclass(frozen=True, slots=True)
class Ranking:
    """Every candidate with its cost, cheapest first, full ones last; empty if there are no candidates.

    `unread`: number of candidates that a choice did not read, because none of them costs less than the chosen one. `left_out`:
    all other workers of the pool by id, each with the reason. `slo`: the request's SLO. `remarks`: what was ignored in the
    request, why no worker can hold its blocks, and which workers' blocks were not looked up, one line each. `index`: if the
    router has a local copy of the index, what answered the lookup, and how old that answer may be.
    """

    input_tokens: int
    results: Sequence[SelectionResult]
    left_out: Mapping[str, str] = field(default_factory=dict)
    slo: Slo = DEFAULT_SLO
    shed_factor: float = LimitSettings().shed_factor
    unread: int = 0
    remarks: tuple[str, ...] = ()
    index: str = field(default="", compare=False)

    def __iter__(self) -> Iterator[SelectionResult]:
        return iter(self.results)

    def __len__(self) -> int:
        return len(self.results)

    @property
    def advice(self) -> Advice:
        """GO: send the request. Otherwise every candidate is full or misses the SLO: hold the request back or refuse
        it."""
        return advise(self.results, self.slo, self.shed_factor)

    @property
    def retry_after_s(self) -> int:
        """Estimated time that the best candidate needs to work off its excess over the SLO, in whole seconds, at least
        1."""
        late_us = (earliest_ttft_us(self.results) or 0) - self.slo.ttft_ms * 1_000
        return max(1, ceil(late_us / 1e6))

    def explain(self) -> str:
        """One line per candidate, then the notes."""
        lines = [f"prompt of {self.input_tokens} tokens", *(result.explain() for result in self.results)]
        lines += self.notes()
        return "\n  ".join(lines)

    def notes(self) -> list[str]:
        """Notes, one line each: the remarks, the index, the number of unread candidates, the advice (unless it is GO),
        and the left-out workers."""
        notes = [*self.remarks, *([f"index: {self.index}"] if self.index else [])]
        if self.unread:
            notes.append(f"{self.unread} more candidates were not read; none of them costs less")
        if self.results and self.advice is not Advice.GO:
            notes.append(f"advice: {self.advice.value}; every candidate has no room or misses the SLO")
        if self.left_out:
            notes.append(f"left out: {list_left_out(self.left_out, MOST_NAMED)}")
        return notes

    def explanation(self, most: int | None = None) -> dict[str, Any]:
        """The ranking as plain data, with at most `most` candidates."""
        return {
            "input_tokens": self.input_tokens,
            "advice": self.advice.value,
            "slo": {"ttft_ms": self.slo.ttft_ms, "tpot_ms": self.slo.tpot_ms},
            "unread": self.unread,
            "candidates": [result.explanation() for result in self.results[:most]],
            "left_out": dict(self.left_out),
            "remarks": list(self.remarks),
            "index": self.index or "store",
        }


@dataclass(frozen=True, slots=True)
class ChoiceData:
    """Where to send a request, and why: the common fields of `Choice` and `SyncChoice`.

    `basis`: how the worker was chosen; `why`: if not by cost, the reason in one line. `would_be`: the worker that cost would
    have chosen, if another policy is followed. `trace`: see `FleetRecord`. `fetch`: what the engine is to fetch from another
    engine; its `fields` have to be sent with the request.
    """

    worker_id: str
    endpoint: EngineEndpoint
    result: SelectionResult
    ranking: Ranking
    basis: Basis = Basis.COST
    why: str = ""
    would_be: str | None = None
    trace: str | None = field(default=None, compare=False, repr=False)
    fetch: Fetch | None = field(default=None, compare=False)

    @property
    def url(self) -> str:
        """The engine's address for routers."""
        return self.endpoint.url

    @property
    def headers(self) -> Mapping[str, str]:
        """Headers to send with the request; they name the rank of a data-parallel engine."""
        return headers_for(self.endpoint)

    @property
    def role(self) -> Role:
        return self.endpoint.role

    @property
    def kind(self) -> EngineKind:
        """The kind of the engine."""
        return self.endpoint.kind

    @property
    def bootstrap_port(self) -> int | None:
        """The bootstrap port of an SGLang prefill server, if reported."""
        return self.endpoint.bootstrap_port

    @property
    def cost(self) -> Cost:
        return self.result.cost

    @property
    def score_us(self) -> int:
        return self.result.score_us

    @property
    def ttft_us(self) -> int | None:
        """The time to the first token, which is part of the cost; None if the profile does not predict it."""
        return self.result.cost.ttft_us

    @property
    def output_tokens(self) -> int | None:
        """The expected length of the answer in tokens; None if it is no longer known."""
        return None if self.result.plan is None else self.result.plan.output_tokens

    @property
    def mode(self) -> str:
        """`basis` as text."""
        return str(self.basis)

    @property
    def advice(self) -> Advice:
        """See `Ranking.advice`."""
        return self.ranking.advice

    @property
    def retry_after_s(self) -> int:
        """Seconds after which to retry a refused request: see `Ranking.retry_after_s`."""
        return self.ranking.retry_after_s

    @property
    def over(self) -> Over:
        """Limits that the worker exceeds, and parts of the SLO that it would miss."""
        return self.result.over

    @property
    def source(self) -> str | None:
        """The worker from which to read `result.transferred_tokens`, if a transfer pays off."""
        return self.result.source

    @property
    def source_kind(self) -> str | None:
        """The kind of `source`: `worker` or `store`."""
        return self.result.source_kind

    @property
    def predicted_cached_tokens(self) -> int:
        """The prompt tokens that the engine should report as cached."""
        return self.result.cached_tokens

    @property
    def unconfirmed_tokens(self) -> int:
        """The cached tokens among them that no event has confirmed: they are being computed, or the engine publishes no
        events."""
        return self.result.predicted_tokens

    def explain(self) -> str:
        """The choice, its cost term by term, and the runner-up."""
        lines = [f"{self.worker_id} at {self.url or '(no address)'}"]
        if self.why:
            lines[0] += f", chosen by {self.basis.value.replace('_', ' ')}: {self.why}"
        lines.append(self.result.explain())
        others = [result for result in self.ranking.results if result.worker_id != self.worker_id]
        if others:
            difference = describe_difference(others[0].score_us - self.result.score_us)
            lines.append(f"next, {difference}: {others[0].explain()}")
        return "\n  ".join([*lines, *self.ranking.notes()])

    def explanation(self, most: int | None = None) -> dict[str, Any]:
        """The choice and its ranking as plain data, with at most `most` candidates."""
        return {
            "worker": self.worker_id,
            "url": self.url,
            "headers": dict(self.headers),
            "role": self.role.value,
            "source": self.source,
            "source_kind": self.source_kind,
            "by": self.mode,
            "why": self.why,
            "would_be": self.would_be,
            "score_us": self.score_us,
            "ttft_us": self.ttft_us,
            "output_tokens": self.output_tokens,
            "predicted_cached_tokens": self.predicted_cached_tokens,
            "unconfirmed_tokens": self.unconfirmed_tokens,
            **self.ranking.explanation(most),
        }


@dataclass(frozen=True, slots=True)
class Choice(ChoiceData):
    """A choice of `RouterClient`. `reservation=None`: nothing is booked."""

    reservation: Reservation | None = field(default=None, compare=False)
    feedback: Feedback | None = field(default=None, compare=False)
    answered: Callable[[Usage, Timings | None, Usage | None], None] | None = field(default=None, compare=False)

    async def first_token(self) -> None:
        """Report the first token: the prompt is no longer waiting at the worker. Does nothing if nothing is booked."""
        if self.reservation is not None:
            await self.reservation.first_token()

    async def done(
        self,
        status: int = 200,
        usage: Usage | None = None,
        timings: Timings | None = None,
        whole: Usage | None = None,
    ) -> None:
        """Report the end of the request: it was answered if `status` is 2xx, broken by a failure of its engine if that is
        500 or more, and otherwise failed (0: no answer). Exiting the block of `route` does the same; if an exception causes
        the exit, the request counts as failed. A second call changes no booking.

        `usage`, from the engine's answer, is compared with the prediction; if the caller passes `timings` (`AnswerClock`),
        the worker's rates are learned from it. `whole`: the usage of the client's request, if this worker generated only the
        end of its answer, so that `usage` counts the rest of that answer as prompt.
        """
        well = 200 <= status < 300
        if well and self.answered is not None and usage is not None:
            self.answered(usage, timings, whole)
        if well and self.feedback is not None and usage is not None and timings is not None:
            self.feedback.record(usage, timings)
        if self.reservation is not None:
            outcome = _outcome_of(status)
            tokens = 0 if outcome is Outcome.BROKEN else None
            await self.reservation.end(outcome, tokens if usage is None else usage.completion_tokens)


def _outcome_of(status: int) -> Outcome:
    if 200 <= status < 300:
        return Outcome.FINISHED
    return Outcome.BROKEN if status >= 500 else Outcome.FAILED


def fell_open_for_want_of(choice: ChoiceData) -> str | None:
    """What was missing when a choice failed open: `index`, `fleet`, `booking` or `connections`; None if it did not
    fail open."""
    part = choice.why.partition(":")[0]
    if part not in ("index", "fleet", "reservations"):
        return None
    if "connections" in choice.why.lower():
        return "connections"
    return "booking" if part == "reservations" else part


def list_left_out(left_out: Mapping[str, str], most: int) -> str:
    """At most `most` workers with the reason for each, and the number of those omitted."""
    named = ", ".join(f"{id} ({why})" for id, why in islice(left_out.items(), most))
    return f"{named} and {len(left_out) - most} more" if len(left_out) > most else named


def describe_difference(us: int) -> str:
    """A difference between two costs, as users read it."""
    return f"{abs(us)} us {'more' if us >= 0 else 'less'}"
