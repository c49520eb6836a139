"""One pool of `MemoryReservations`: bookings and predictions by worker, with sums that are kept up to date.

Nothing here iterates over all bookings: when ten thousand are open, another booking costs as much as the first one did.
"""

from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace

from kvatlas.blocks.hashing import HASH_BYTES
from kvatlas.cost.protocol import Load
from kvatlas.cost.regression import Evidence
from kvatlas.reservations.due_heap import Deadlines
from kvatlas.reservations.pool_queue import PoolQueue
from kvatlas.reservations.protocol import STALE_US, LoadReport
from kvatlas.reservations.room_and_slo import UNKNOWN_LIMIT, Limit


@dataclass(frozen=True, slots=True)
class BookedRequest:
    """A reservation. `booked_us`: when it was booked; a load sample includes it only if it covers this time."""

    worker_id: str
    router_id: str
    booked_us: int
    ends_us: int
    queued_tokens: int
    kv_tokens: int
    prefilling: bool = True


@dataclass(frozen=True, slots=True)
class PredictedPrefix:
    """A prediction of the steps from number `first` on. `used`: when it was last used, and the id of that use."""

    worker_id: str
    ready_us: int
    ends_us: int
    believed_us: int
    first: int
    capacity_steps: int
    hashes: bytes
    used: tuple[int, bytes]

    @property
    def steps(self) -> int:
        return len(self.hashes) // HASH_BYTES


@dataclass(slots=True)
class PoolWorker:
    """A worker's report, and its bookings. The load sample covers bookings up to `covered_us`; `uncovered` holds the others,
    with their sums."""

    incarnation: int | None = None
    reported: Load | None = None
    sampled_us: int = 0
    covered_us: int = 0
    likeness: bytes = b""
    limit: Limit = UNKNOWN_LIMIT
    booked: set[bytes] = field(default_factory=set)
    uncovered: Deadlines[bytes] = field(default_factory=Deadlines)
    running: int = 0
    queued_tokens: int = 0
    kv_tokens: int = 0

    def load_at(self, now_us: int) -> Load | None:
        """The reported load; None if it is unknown or too old."""
        return self.reported if now_us - self.sampled_us < STALE_US else None

    @property
    def load_booked(self) -> Load:
        """The load that has been booked since the sample."""
        return Load(self.running, self.queued_tokens, 0, self.kv_tokens)

    def count(self, request: BookedRequest, sign: int) -> None:
        """Add a booking to the sums (1) or remove it from them (-1)."""
        self.running += sign
        self.queued_tokens += sign * request.queued_tokens
        self.kv_tokens += sign * request.kv_tokens


class MemoryPool:
    """The pool that the module docstring describes. Only its methods change bookings and predictions."""

    def __init__(self, rates: dict[str, Evidence] | None = None) -> None:
        self.workers: dict[str, PoolWorker] = {}
        self.booked: dict[bytes, BookedRequest] = {}
        self.predictions: dict[bytes, PredictedPrefix] = {}
        self.called_off: Deadlines[bytes] = Deadlines()
        self.routers: dict[str, int] = {}
        self.busy_until_us: dict[str, int] = {}
        """When the fetches that are booked at each source should end."""
        self.queue = PoolQueue()
        self.rates: dict[str, Evidence] = {} if rates is None else rates
        self.ends: Deadlines[bytes] = Deadlines()
        self.prediction_ends: Deadlines[bytes] = Deadlines()
        self._of_router: defaultdict[str, set[bytes]] = defaultdict(set)
        self._of_worker: defaultdict[str, set[bytes]] = defaultdict(set)
        self._steps: Counter[str] = Counter()
        self._starts: defaultdict[tuple[int, bytes], set[bytes]] = defaultdict(set)
        self._firsts: Counter[int] = Counter()

    # ------------------------------------------------------------ bookings

    def add_booking(self, id: bytes, request: BookedRequest) -> None:
        """Add a booking under a new id."""
        worker = self.workers.setdefault(request.worker_id, PoolWorker())
        self.booked[id] = request
        self._of_router[request.router_id].add(id)
        worker.booked.add(id)
        self.ends.add(request.ends_us, id)
        if request.booked_us > worker.covered_us:
            worker.uncovered.add(request.booked_us, id)
            worker.count(request, 1)

    def end_prefill(self, id: bytes) -> None:
        """Record that the prompt of a booking is no longer waiting."""
        request = self.booked[id]
        worker = self.workers[request.worker_id]
        if id in worker.uncovered:
            worker.queued_tokens -= request.queued_tokens
        self.booked[id] = replace(request, queued_tokens=0, prefilling=False)

    def remove_booking(self, id: bytes) -> BookedRequest | None:
        """Remove and return a booking. Returns None if it does not (or no longer) exist."""
        request = self.booked.pop(id, None)
        if request is None:
            return None
        worker = self.workers[request.worker_id]
        worker.booked.discard(id)
        if id in worker.uncovered:
            worker.uncovered.discard(id)
            worker.count(request, -1)
        self.ends.discard(id)
        ids = self._of_router[request.router_id]
        ids.discard(id)
        if not ids:
            del self._of_router[request.router_id]
        return request

    def cover(self, worker: PoolWorker, until_us: int, sample: LoadReport) -> Load:
        """Apply a load sample. It includes the worker's bookings up to this time, except for prompts that its engine has not
        computed yet: as many as are waiting there, plus that of one running request, whose prefill may have just begun. Those
        are the newest bookings, because engines compute in the order of arrival.

        Returns the load in the sample without the requests whose bookings keep counting. An engine that reports tokens but no
        waiting requests knows its queue: its sample includes everything.
        """
        load, waiting = sample.load, sample.waiting
        in_time = worker.uncovered.list_due(until_us)
        most = 0 if load.queued_prefill_tokens and not waiting else waiting + min(1, load.running_decodes)
        covered_us, kept = until_us, 0
        for booked_us, id in reversed(in_time):
            if kept == most or not self.booked[id].prefilling:
                break
            kept, covered_us = kept + 1, booked_us - 1
        going_on = [self.booked[id] for booked_us, id in in_time if booked_us > covered_us]
        worker.covered_us = max(worker.covered_us, covered_us)
        for id in worker.uncovered.take_due(worker.covered_us):
            worker.count(self.booked[id], -1)
        known = min(len(going_on), waiting)
        begun = going_on[: len(going_on) - known]
        return Load(
            max(0, load.running_decodes - len(begun)),
            int(load.queued_prefill_tokens * ((waiting - known) / waiting)) if waiting else load.queued_prefill_tokens,
            max(0, load.waiting_requests - known),
            max(0, load.kv_tokens - sum(one.kv_tokens for one in begun)),
        )

    def booked_by(self, router_id: str) -> list[bytes]:
        return list(self._of_router.get(router_id, ()))

    # ------------------------------------------------------------ predictions

    def put_prediction(self, id: bytes, prediction: PredictedPrefix) -> None:
        """Add a prediction, or replace the one with this id."""
        self.remove_prediction(id)
        self.predictions[id] = prediction
        self.prediction_ends.add(prediction.ends_us, id)
        self._of_worker[prediction.worker_id].add(id)
        self._steps[prediction.worker_id] += prediction.steps
        self._starts[prediction.first, prediction.hashes[:HASH_BYTES]].add(id)
        self._firsts[prediction.first] += 1

    def remove_prediction(self, id: bytes) -> None:
        prediction = self.predictions.pop(id, None)
        if prediction is None:
            return
        self.prediction_ends.discard(id)
        worker_id, start = prediction.worker_id, (prediction.first, prediction.hashes[:HASH_BYTES])
        self._steps[worker_id] -= prediction.steps
        self._firsts[prediction.first] -= 1
        self._of_worker[worker_id].discard(id)
        self._starts[start].discard(id)
        if not self._of_worker[worker_id]:
            del self._of_worker[worker_id], self._steps[worker_id]
        if not self._starts[start]:
            del self._starts[start]
        if not self._firsts[prediction.first]:
            del self._firsts[prediction.first]

    def predicted_for(self, worker_id: str) -> list[bytes]:
        return list(self._of_worker.get(worker_id, ()))

    def predicted_steps(self, worker_id: str) -> int:
        """The number of steps that a worker is predicted to hold."""
        return self._steps.get(worker_id, 0)

    def predictions_along(self, hashes: bytes) -> list[bytes]:
        """The predictions whose first step is part of this chain, at the same place."""
        found: list[bytes] = []
        for first in self._firsts:
            step = hashes[first * HASH_BYTES : (first + 1) * HASH_BYTES]
            if step:
                found += self._starts.get((first, step), ())
        return found
