"""kvatlas: the router's own lookup, pricing, reservations and learned rates, on the index that events fill."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kvatlas.blocks.tiers import Tier
from kvatlas.cost import EngineProfile, EngineRates
from kvatlas.cost.learned_rates import FinishedRequest
from kvatlas.cost.protocol import Load
from kvatlas.fleet.records import (
    EngineEndpoint,
    EngineKind,
    EngineState,
    FleetRecord,
    KvConnector,
    Liveness,
)
from kvatlas.identity import pool_id
from kvatlas.index.memory.index import MemoryIndex
from kvatlas.request import Slo
from kvatlas.reservations import (
    Booking,
    LoadReport,
    MemoryReservations,
    MustWait,
    Outcome,
    QueueIsFull,
    Turns,
    WorkerReport,
)
from kvatlas.reservations.protocol import ID_BYTES
from kvatlas_router.admission.queue import QueueSettings
from kvatlas_simulator.engine.step_cost import StepCost
from kvatlas_simulator.lab.engine import EngineRequest, VirtualEngine
from kvatlas_simulator.lab.engine_metrics import EngineMetrics, read_true_load
from kvatlas_simulator.lab.event_path import finish
from kvatlas_simulator.lab.policies.engine_names import worker_name
from kvatlas_simulator.lab.policies.protocol import REFUSED, WAITS, LabFetch, LoadBlind
from kvatlas_simulator.lab.policies.waiting_requests import WaitingRequests
from kvatlas_simulator.lab.requests import MODEL, LabRequest
from router_client.booking.booker import evaluate_without_bookings
from router_client.decision.case import Case
from router_client.decision.policy import RoutingPolicy
from router_client.learning.fetches import Fetches
from router_client.learning.output_lengths import OutputLengths
from router_client.learning.rates import PoolRates
from router_client.learning.token_counts import Usage
from router_client.pricing.engine_priority import engine_priority
from router_client.pricing.overlap import ResidencyOnly, look_up_overlap
from router_client.pricing.pool import Pool
from router_client.pricing.quotes import rendezvous_weight, with_source
from router_client.pricing.ranking import IN_FLIGHT, RankedResults
from router_client.pricing.slo import Advice, advise
from router_client.prompt import Prompt
from router_client.settings import BookingSettings, LimitSettings, RouterSettings, SloMode

POOL = pool_id(MODEL, MODEL)
_SLO = Slo(ttft_ms=2_000, tpot_ms=100)
"""The objective of the lab's figures."""
_FETCH_BY = frozenset({KvConnector.P2P})
_PEER: Mapping[str, Any] = {
    "kv_connector": KvConnector.P2P,
    "kv_port": 1,
    "kv_tiers": (Tier.HBM.label, Tier.CPU_DRAM.label),
    "base_url": "http://10.0.0.1",
}


@dataclass(frozen=True, slots=True)
class AtlasSettings:
    """Features that are switched on. `events` False: the engines publish none, and what they hold is only predicted. `marks`
    False: everything that hybrids hold counts as reusable. `replicas`: number of routers, which take requests in turn; unless
    their bookings are `shared`, each knows only its own bookings and the engines' reports. Each learns from its own requests,
    and once a second from the others'. `true_loads`: each choice sees the current loads and queues; `true_rates`: prices are
    the engines' step costs, and nothing is learned. `fetches`: engines fetch KV from each other; `priorities`: their queues
    are ordered by `engine_priority`, not by arrival. `slo`: the effect of the objective; `sheds`: requests that are advised to
    be shed are refused. `slots`: engines report their request slots. `queue`: while every engine is full, requests wait, unless
    None: in the pool's queue if bookings are `shared`, otherwise in each router's own queue."""

    booking: BookingSettings = field(default_factory=BookingSettings)
    learning: bool = True
    events: bool = True
    marks: bool = True
    replicas: int = 1
    shared: bool = True
    true_loads: bool = False
    true_rates: bool = False
    fetches: bool = False
    priorities: bool = False
    slo: SloMode = SloMode.TOLD
    sheds: bool = False
    slots: bool = False
    queue: QueueSettings | None = None


class _Clock:
    now_us = 0


class _Router:
    """One router: its bookings, what it has learned, and the fleet as it last read it."""

    pool: Pool

    def __init__(self, number: int, book: MemoryReservations, rates: EngineRates) -> None:
        self.number = number
        self.name = f"r{number}"
        self.book = book
        self.rates = PoolRates(EngineProfile(rates))
        self.lengths = OutputLengths()


@dataclass(slots=True)
class _Open:
    """An open request: its router, when it was chosen, the results, and the duration of a decode step at the time of its
    first token."""

    router: "_Router"
    prompt: Prompt
    chosen_us: float
    results: RankedResults
    predicted_wait: bool
    step_us: float = 0.0


class Atlas(LoadBlind):
    """The routers of one fleet."""

    def __init__(
        self, engines: Sequence[VirtualEngine], index: MemoryIndex, cost: StepCost, settings: AtlasSettings
    ) -> None:
        """`cost`: needed for the times between tokens, which a client would measure."""
        self._engines = engines
        held = index if settings.events else MemoryIndex()
        self._index = held if settings.marks else ResidencyOnly(held)
        self._cost = cost
        self._settings = settings
        self._router_settings = RouterSettings(
            booking=settings.booking, router_id="lab", limits=LimitSettings(slo=settings.slo)
        )
        self._policy = RoutingPolicy(self._router_settings)
        self._block_tokens = engines[0].block_tokens
        self._clock = _Clock()
        books = [
            MemoryReservations(lambda: self._clock.now_us) for _ in range(1 if settings.shared else settings.replicas)
        ]
        rates = _rates_of(cost) if settings.true_rates else EngineRates()
        self._routers = [_Router(i, books[i % len(books)], rates) for i in range(settings.replicas)]
        self._open: dict[int, _Open] = {}
        self._turn = 0
        self._metrics = EngineMetrics(slots=settings.slots)
        self._waiting = None if settings.queue is None else WaitingRequests(settings.replicas, settings.queue)
        self._last: RankedResults | None = None
        self._fetches = Fetches(lambda: self._clock.now_us / 1e6)
        self._read_records(1)

    # ---------------------------------------------------------------- choices

    def choose(self, request: LabRequest, now_us: float) -> int:
        self._clock.now_us = round(now_us)
        if self._settings.true_loads:
            self._report_loads(round(now_us))
        waiting = None
        if self._waiting is not None and (waiting := self._waiting.row(request, now_us)) is None:
            self._waiting.remove(request, now_us)
            return REFUSED
        router = self._router_of(request)
        chain = request.prompt_chain(self._block_tokens)
        scope, tokens = request.identity.scope, request.input_tokens
        prompt = Prompt.of_hashes(scope, chain, self._block_tokens, input_tokens=tokens, slo=_SLO)
        if self._settings.learning:
            prompt = replace(prompt, output_tokens=router.lengths.expect(prompt))
        if self._settings.fetches:
            prompt = replace(prompt, fetch_by=_FETCH_BY)
            self._fetches.record_prompt(POOL, chain, self._block_tokens)
        lookup = finish(look_up_overlap(self._index, prompt, router.pool.looked_up_shapes))
        case = Case(prompt, router.pool, lookup)
        quotes = self._policy.quote(case)
        ask = self._policy.ask(case, quotes)
        if self._settings.booking.reservations:
            longest_us = round(self._settings.booking.longest_s * 1e6)
            booking = Booking(
                request.number.to_bytes(ID_BYTES, "big"),
                router.name,
                request.input_tokens,
                ask,
                longest_us,
                longest_us,
                waiting=waiting,
            )
            try:
                evaluation = router.book.book_now(POOL, booking)
            except MustWait:
                assert self._waiting is not None
                self._waiting.add(request, router.number, now_us)
                return WAITS
            except QueueIsFull:
                return REFUSED
            if evaluation is None:
                raise RuntimeError(f"booking {request.number} was cancelled")
        else:
            evaluation = evaluate_without_bookings(ask, router.pool, quotes)
        results = RankedResults(
            with_source(quotes, evaluation.worker_id, evaluation.source),
            evaluation.by_offer,
            chosen=evaluation.chosen,
            criteria=self._policy.criteria(prompt),
        )
        if self._settings.sheds and advise(results, _SLO, self._router_settings.limits.shed_factor) is Advice.SHED:
            router.book.release_now(POOL, request.number.to_bytes(ID_BYTES, "big"), Outcome.CALLED_OFF)
            return REFUSED
        if self._waiting is not None:
            self._waiting.remove(request, now_us)
        self._last = results
        self._open[request.number] = _Open(router, prompt, now_us, results, IN_FLIGHT in results[0].cost.kinds)
        return int(quotes[evaluation.chosen].id[1:])

    @property
    def next_turns_us(self) -> float:
        return math.inf if self._waiting is None else self._waiting.next_look_us

    def take_turns(self, now_us: float) -> Sequence[LabRequest]:
        assert self._waiting is not None
        self._clock.now_us = round(now_us)

        def take(number: int) -> Turns:
            router = self._routers[number]
            return router.book.turns_now(POOL, router.name, (), ())

        return self._waiting.take_due(now_us, take)

    def _router_of(self, request: LabRequest) -> "_Router":
        """The router that a request waits at, or else its client's, or else the next one."""
        at = None if self._waiting is None else self._waiting.router_of(request)
        if at is not None:
            return self._routers[at]
        turn = request.router
        if turn is None:
            turn = self._turn
            self._turn += 1
        return self._routers[turn % len(self._routers)]

    def priority_of(self, request: LabRequest, now_us: float) -> int:
        chosen = self._last if self._settings.priorities else None
        return engine_priority(now_us, chosen[0].cost) if chosen is not None else 0

    def fetch_of(self, request: LabRequest) -> LabFetch | None:
        result = self._open[request.number].results[0]
        if result.source is None:
            return None
        return LabFetch(int(result.source[1:]), result.usable_tokens + result.transferred_tokens)

    def predicted_tokens(self, number: int) -> int:
        """Number of an open request's tokens that its engine is expected not to compute."""
        plan = self._open[number].results[0].plan
        return 0 if plan is None else plan.cached_tokens

    # ---------------------------------------------------------------- feedback

    def record_first_token(self, sequence: EngineRequest, engine: int) -> None:
        self._clock.now_us = round(sequence.first_token_us)
        number = sequence.request.number
        opened = self._open[number]
        opened.step_us = self._step_us(engine)
        if opened.results[0].source is not None:
            usage = Usage(sequence.request.input_tokens, 0, sequence.cached_tokens)
            self._fetches.record(POOL, opened.results[0], usage)
        if self._settings.booking.reservations:
            finish(opened.router.book.record_first_token(POOL, number.to_bytes(ID_BYTES, "big")))

    def record_finish(self, sequence: EngineRequest, engine: int) -> None:
        self._clock.now_us = round(sequence.finished_us)
        request = sequence.request
        opened = self._open.pop(request.number)
        self._metrics.record_finish(request.input_tokens)
        if self._settings.booking.reservations:
            id = request.number.to_bytes(ID_BYTES, "big")
            opened.router.book.release_now(POOL, id, Outcome.FINISHED, request.output_tokens)
        chosen, router = opened.results[0], opened.router
        if self._waiting is not None:
            self._waiting.record_end(router.number, sequence.finished_us)
        if self._settings.learning:
            router.lengths.record(opened.prompt, request.output_tokens)
        if not self._learns or chosen.plan is None:
            return
        last = self._last
        router.rates.add(
            FinishedRequest(
                plan=chosen.plan,
                prompt_tokens=request.input_tokens,
                output_tokens=request.output_tokens,
                cached_tokens=sequence.cached_tokens,
                load_known=chosen.load_known,
                waited=opened.predicted_wait,
                load_after=None if last is None or last is opened.results else last.load_of(chosen.worker_id),
                ttft_us=sequence.first_token_us - opened.chosen_us,
                # a client uses the median time between tokens, that is, of steps without prefill
                tpot_us=(opened.step_us + self._step_us(engine, ended=request)) / 2,
            )
        )

    def record_loss(self, sequence: EngineRequest, engine: int, now_us: float) -> None:
        self._clock.now_us = round(now_us)
        number = sequence.request.number
        opened = self._open.pop(number)
        if self._settings.booking.reservations:
            opened.router.book.release_now(POOL, number.to_bytes(ID_BYTES, "big"), Outcome.BROKEN)

    def record_loads(self, engines: Sequence[VirtualEngine], now_us: float) -> None:
        self._clock.now_us = round(now_us)
        if self._learns:
            book = self._routers[0].book  # evidence is shared, even if bookings are not
            for router in self._routers:
                if unshared := router.rates.take_unshared():
                    finish(book.add_evidence(POOL, unshared))
            for router in self._routers:
                finish(router.rates.update(finish(book.read_evidence(POOL))))
        self._report_loads(round(now_us))

    @property
    def _learns(self) -> bool:
        return self._settings.learning and not self._settings.true_rates

    def _report_loads(self, now_us: int) -> None:
        records = self._read_records(now_us)
        reports = {
            id: WorkerReport(
                record.incarnation,
                LoadReport(Load.of(record.load, self._block_tokens), waiting=record.load.forward_pass.requests_waiting),
            )
            for id, record in records.items()
            if record.load is not None
        }
        for book in {id(one.book): one.book for one in self._routers}.values():
            book.report_now(POOL, reports)

    def _read_records(self, now_us: int) -> Mapping[str, FleetRecord]:
        """The current fleet records, which every router has read."""
        records = self._records(now_us)
        for router in self._routers:
            router.pool = Pool.of(records, None, router.rates.profile, self._fetches)
        return records

    def _records(self, now_us: int) -> Mapping[str, FleetRecord]:
        """The current fleet records."""
        records = {}
        for number, engine in enumerate(self._engines):
            id, read = worker_name(number), read_true_load if self._settings.true_loads else self._metrics.read
            load = read(id, engine, now_us)
            endpoint = EngineEndpoint(
                id=id,
                kind=EngineKind.MOCK,
                model_id=MODEL,
                tokenizer_id=MODEL,
                block_size=self._block_tokens,
                events=self._settings.events,
                marks=engine.is_hybrid and self._settings.events,
                **(_PEER if self._settings.fetches else {}),
            )
            records[id] = FleetRecord(
                endpoint=endpoint,
                state=EngineState.UP if engine.up else EngineState.DRAINING,
                liveness=Liveness.ALIVE,
                load=load,
                incarnation=1,
            )
        return records

    def _step_us(self, engine: int, ended: LabRequest | None = None) -> float:
        """The current duration of this engine's decode steps; `ended`: a request that was part of them and has just
        ended."""
        one = self._engines[engine]
        sequences, kv_tokens = len(one.running), one.kv_tokens
        if ended is not None:
            sequences, kv_tokens = sequences + 1, kv_tokens + ended.input_tokens + ended.output_tokens
        return self._cost.step_us(
            prefill_tokens=0, decode_sequences=sequences, decode_kv_tokens=kv_tokens, swapped_in=0
        )


def _rates_of(cost: StepCost) -> EngineRates:
    """The rates of engines with these costs."""
    return EngineRates(
        cost.prefill_us_per_token,
        0.0,
        cost.decode_step_us,
        cost.decode_us_per_sequence,
        cost.decode_us_per_kv_token,
    )


class OverlapOnly(LoadBlind):
    """The engine that holds the most of the prompt according to the index, whatever its load; ties by a hash of the prompt."""

    def __init__(self, engines: Sequence[VirtualEngine], index: MemoryIndex) -> None:
        self._engines = engines
        self._index = index
        self._block_tokens = engines[0].block_tokens

    def choose(self, request: LabRequest, now_us: float) -> int:
        chain = request.prompt_chain(self._block_tokens)
        depths = self._index.overlap_now(request.identity.scope, chain).depths() if chain else {}
        fingerprint = chain[-8:] or request.number.to_bytes(8, "little")
        names = {number: worker_name(number) for number, engine in enumerate(self._engines) if engine.up}
        return max(names, key=lambda i: (depths.get(names[i], 0), rendezvous_weight(fingerprint, names[i])))
