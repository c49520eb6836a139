"""Reservations: the protocol, and the values that it is asked with.

A pool's load is what its workers report and what routers have booked on them since. A **reservation** is one request on
one worker: it queues the prompt tokens that the worker has to compute until the first token is there, and runs until it
is released. A **prediction** is what a reservation leaves in a cache: the prompt's blocks count as held by the worker from
the moment that its prefill should end, until its events confirm them, or for good reasons not any more.

Prefixes are told in **steps** of STEP_BLOCKS blocks: of a chain only every STEP_BLOCKS-th hash travels, so what is
predicted is a lower bound within STEP_BLOCKS - 1 blocks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, Protocol

from kvatlas.blocks.hashing import HASH_BYTES, thin
from kvatlas.cost.protocol import Load, Prices
from kvatlas.cost.regression import Evidence
from kvatlas.errors import InvalidValue
from kvatlas.fleet.records import FleetRecord
from kvatlas.reservations.limits import Limits

STEP_BLOCKS = 8
MAX_STEPS = 1_024
"""Longer prompts are predicted as far as this: 8,192 blocks."""
ID_BYTES = 16

STALE_US = 5_000_000
"""A load sample that is older says nothing: engines are sampled each second."""
ARRIVAL_US = 100_000
"""A load sample has the bookings made so long before it: a request needs some time from its booking to the engine."""


@dataclass(frozen=True, slots=True)
class StepChain:
    """A prompt cut for one block size: `step_tokens` tokens a step, and 8 packed bytes that name each (`of` makes them)."""

    step_tokens: int
    hashes: bytes

    @classmethod
    def of(cls, scope_id: bytes, block_size: int, chain: bytes) -> "StepChain":
        """From the packed sequence hashes of a prompt's blocks. The scope is mixed in: equal tokens in two scopes differ."""
        hashes = thin(chain[: MAX_STEPS * STEP_BLOCKS * HASH_BYTES], STEP_BLOCKS)
        mixed = int.from_bytes(hashes, "big") ^ int.from_bytes(scope_id * (len(hashes) // HASH_BYTES), "big")
        return cls(block_size * STEP_BLOCKS, mixed.to_bytes(len(hashes), "big"))


class OfferKind(NamedTuple):
    """What a request meets on all workers that are alike.

    `chain`: which of the ask's chains is cut as their blocks are; None for none, then nothing is predicted. Of a prefix of
    n tokens that one is predicted to hold, min(n, `limit_tokens`) - `lost_tokens` can be used. What is predicted is
    believed for `believed_us` after it should be there; on workers whose events confirm nothing (`capacity_steps` above
    0) at most so many steps are.
    """

    chain: int | None
    limit_tokens: int
    lost_tokens: int
    prices: Prices
    believed_us: int
    capacity_steps: int = 0


class Offer(NamedTuple):
    """A worker that may be booked, and what the request would cost there.

    `held_steps`: those that the index knows of, `cached_tokens` in all. `base_us`: the cost without load, of which
    `work_us` pass before the first token. Offers of one `kind` share the object.
    """

    worker_id: str
    kind: OfferKind
    held_steps: int
    cached_tokens: int
    base_us: float
    work_us: float


@dataclass(frozen=True, slots=True)
class Pairing:
    """How the offers of an ask go together where one worker computes the prompt and another one the answer.

    The first `prefills` offers compute the prompt alone, the next `decodes` the answer alone, all others both.
    `groups` has a number for each prefill offer, `transfers_us` for each decode offer what moving the prompt's KV there
    takes from each of these groups; below 0: it can't be moved.
    """

    prefills: int
    decodes: int
    groups: Sequence[int]
    transfers_us: Sequence[Sequence[float]]


@dataclass(frozen=True, slots=True)
class Ask:
    """Which of `offers` is cheapest now? Ties go to the first.

    `again_factor`: tokens that a worker would compute although another one is computing them now cost so many times more.
    `limits` absent: none are looked at. `pairing` absent: one offer is chosen, not a pair.
    """

    offers: Sequence[Offer]
    chains: Sequence[StepChain] = ()
    again_factor: float = 0.0
    stale_us: int = STALE_US
    limits: Limits | None = None
    pairing: Pairing | None = None


@dataclass(frozen=True, slots=True)
class Booking:
    """An ask whose cheapest offer is to be reserved under an id that the router made (16 bytes, never used twice).

    The reservation lives as long as the router's lease, which this call renews, and at most `longest_us`. Where a pair
    is chosen, `id` is of the worker that computes the answer, and `prefill_id` of the one that computes the prompt.
    Raises InvalidValue for an id of another length, an ask without offers, or with a pairing and no second id.
    """

    id: bytes
    router_id: str
    input_tokens: int
    ask: Ask
    lease_us: int
    longest_us: int
    prefill_id: bytes | None = None

    def __post_init__(self) -> None:
        for id in (self.id, self.prefill_id):
            if id is not None and len(id) != ID_BYTES:
                raise InvalidValue(f"reservation id of {len(id)} bytes; expected {ID_BYTES}")
        if self.ask.pairing is not None and self.prefill_id in (None, self.id):
            raise InvalidValue("a booking of a pair without an id of its own for the prefill")
        if not self.ask.offers:
            raise InvalidValue("a booking without offers; expected at least one worker")


class Weighed(NamedTuple):
    """What an offer was judged by: reported and booked load, and the prefix that it is predicted to hold.

    `load_known` False: what it reports is unknown or too old, and the mean of the others stands in. `predicted_tokens`
    above 0: it counts as holding so many, after waiting `wait_us` longer than for its backlog. `again_tokens`: those that
    another worker is computing now and this one would compute as well. `over`: limits that it would go over (flags of
    `kvatlas.reservations.limits.Over`), `missed_us` by how much the SLO's.
    """

    load: Load
    load_known: bool = False
    predicted_tokens: int = 0
    wait_us: float = 0.0
    again_tokens: int = 0
    over: int = 0
    missed_us: float = 0.0


@dataclass(frozen=True, slots=True)
class Weighing:
    """Every offer of an ask, in its order, and which of them is the cheapest.

    Of an ask with a pairing, `chosen` computes the answer, and `prefill` the prompt (None: `chosen` computes both).
    """

    chosen: int
    weighed: Sequence[Weighed]
    prefill: int | None = None


class Outcome(StrEnum):
    """How a reservation ends.

    `FINISHED`: its prompt was computed. `FAILED`: perhaps not; what was still being computed is not believed any more.
    `CALLED_OFF`: nobody knows whether it was ever made (the call was not answered); should it come late, it is refused.
    """

    FINISHED = "finished"
    FAILED = "failed"
    CALLED_OFF = "called_off"


@dataclass(frozen=True, slots=True)
class LoadReport:
    """A worker's load sample, `age_us` old. `covers`: whether it has the bookings made ARRIVAL_US before it was taken."""

    load: Load
    age_us: int = 0
    covers: bool = True


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """What is known of a worker: its incarnation, and its load if it tells one."""

    incarnation: int
    sample: LoadReport | None = None

    @classmethod
    def of(cls, record: FleetRecord, now_us: int) -> "WorkerReport":
        """From a fleet record. `now_us`: the clock of who heard it, or one that agrees with the worker's."""
        if record.load is None:
            return cls(record.incarnation)
        load = Load.of(record.load, record.endpoint.block_size or 1)
        if not record.load.sampled_us:  # taken at a time unknown: it may have any booking or none
            return cls(record.incarnation, LoadReport(load, 0, covers=False))
        if record.load_age_us is None or not record.heard_us:
            return cls(record.incarnation, LoadReport(load, max(0, now_us - record.load.sampled_us)))
        return cls(record.incarnation, LoadReport(load, max(0, now_us - record.heard_us) + record.load_age_us))


class Reservations(Protocol):
    """The bookings of every router on every pool. All calls raise Unreachable; times are those of the store's clock.

    Promises: `book` chooses and reserves in one step, so that all routers see each other's bookings. A reservation ends
    by its release, with its router's lease, with its worker's incarnation, or after its longest time, whichever is first;
    what is ended can be ended again. Nothing predicted outlives the time that it is believed for, a failure of its
    request, or its worker's incarnation.

    Where that clock goes back (another server's, or stepped) all that is booked and predicted ends with the next report: it
    would count until the clock is where it was.
    """

    @property
    def hears_fleet(self) -> bool:
        """True: the indexer reports workers. False: whoever asks has to `report` what it knows."""

    async def look(self, pool_id: str, ask: Ask) -> Weighing:
        """What `book` would choose now. Books nothing."""

    async def book(self, pool_id: str, booking: Booking) -> Weighing | None:
        """Reserve the cheapest offer; None where the booking was called off before. Told again it is made anew."""

    async def prefilled(self, pool_id: str, id: bytes) -> bool:
        """The request's first token is there. False where there is no such reservation, or it was told before."""

    async def release(self, pool_id: str, id: bytes, outcome: Outcome) -> bool:
        """End a reservation. False where there is none (any more)."""

    async def beat(self, pool_id: str, router_id: str, lease_us: int) -> bool:
        """Renew a router's lease. False where it was over, and with it every reservation made under it."""

    async def leave(self, pool_id: str, router_id: str) -> None:
        """End a router's lease, and with it its reservations."""

    async def report(self, pool_id: str, reports: Mapping[str, WorkerReport]) -> None:
        """Tell of workers by id. Another incarnation ends a worker's bookings and predictions; older samples are ignored."""

    async def forget(self, pool_id: str, worker_id: str) -> None:
        """The worker is gone, with all that was booked, predicted and learned there."""

    async def learn(self, pool_id: str, evidence: Mapping[str, Evidence]) -> None:
        """Add evidence of workers' rates to what all routers told. Of workers that were never reported it is dropped."""

    async def learned(self, pool_id: str) -> Mapping[str, Evidence]:
        """What all routers told of workers' rates; of workers that nobody told of there is none."""
