"""Reservations: the protocol, and the values that its calls take and return.

The load of a pool is what its workers report plus what routers have booked on them since then. A **reservation** is one request
on one worker: it queues the prompt tokens that the worker has to compute until the first token arrives, and runs until it is
released. A **prediction** is the cache content that a reservation leaves behind: the prompt's blocks count as held by the
worker from the time when its prefill should end until its events confirm them or the prediction ends (see `Reservations`).

Prefixes are cut into **steps** of STEP_BLOCKS blocks: only every STEP_BLOCKS-th hash of a chain is sent, so a prediction is a
lower bound within STEP_BLOCKS - 1 blocks.

A choice among hundreds of workers names only a few of them. The rest are **look-alikes**: workers of one likeness that hold
the same blocks and differ only in their load. An ask makes one offer to all of them, and the store, which keeps them sorted by
load, finds the cheapest. With a lookup (`kvatlas.reservations.lookup`), they may also hold different parts of the prompt.
"""

from collections.abc import Collection, Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple, Protocol

from kvatlas.blocks.hashing import HASH_BYTES, thin
from kvatlas.cost.protocol import Load, Prices
from kvatlas.cost.regression import Evidence
from kvatlas.dataclass import dataclass
from kvatlas.errors import InvalidValue, KvatlasError
from kvatlas.fleet.records import FleetRecord
from kvatlas.reservations.likeness import likeness_of
from kvatlas.reservations.lookup import Lookup
from kvatlas.reservations.room_and_slo import UNKNOWN_LIMIT, Limit, Limits, limit_of
from kvatlas.reservations.waiting_request import Turns, WaitingRequest

STEP_BLOCKS = 8
MAX_STEPS = 1_024
"""Longer prompts are predicted only up to this point: 8,192 blocks."""
MOST_OFFERS, MOST_LIKENESSES, MOST_STEPS = 192, 32, 2_048
"""Limits of one ask: offers and kinds of look-alikes together, kinds of look-alikes, and the steps of all chains. More of these
would hold up the store for a long time."""
ID_BYTES = 16
MOST_SOURCES = 16
"""Maximum number of equal sources that one offer names."""

STALE_US = 5_000_000
"""Load samples older than this are ignored: engines are sampled every second."""
ARRIVAL_US = 100_000
"""A load sample includes bookings made at least this long before it: the time that a request may take to reach its engine."""


@dataclass(frozen=True, slots=True)
class StepChain:
    """A prompt, cut into steps for one block size: `step_tokens` tokens per step, and 8 packed bytes for each step (made by
    `of`)."""

    step_tokens: int
    hashes: bytes

    @classmethod
    def of(cls, scope_id: bytes, block_size: int, chain: bytes) -> "StepChain":
        """Cut a prompt's packed sequence hashes into steps. The scope is mixed in, so that equal tokens in two scopes
        differ."""
        hashes = thin(chain[: MAX_STEPS * STEP_BLOCKS * HASH_BYTES], STEP_BLOCKS)
        mixed = int.from_bytes(hashes, "big") ^ int.from_bytes(scope_id * (len(hashes) // HASH_BYTES), "big")
        return cls(block_size * STEP_BLOCKS, mixed.to_bytes(len(hashes), "big"))


class OfferKind(NamedTuple):
    """Everything about a request that is the same on all look-alikes.

    `chain`: the index of the ask's chain that matches their block size; None: no chain matches, and nothing is predicted. A
    predicted prefix of n tokens has min(n, `limit_tokens`) - `lost_tokens` usable ones. A prediction is believed for
    `believed_us` after the time at which it should be ready; on workers whose events confirm nothing, up to `capacity_steps`
    steps are believed (0: events confirm them). `interference`: the cost of each microsecond by which computing this prompt
    delays one of the worker's open requests.
    """

    chain: int | None
    limit_tokens: int
    lost_tokens: int
    prices: Prices
    believed_us: int
    capacity_steps: int = 0
    interference: float = 0.0


class Fetching(NamedTuple):
    """A transfer of `us` microseconds that a request makes its worker start, from any one of these equal `sources`."""

    sources: tuple[str, ...]
    us: int


class Offer(NamedTuple):
    """A worker that may be booked, and what the request costs there.

    `held_steps`: the steps that the index knows of; `cached_tokens`: everything that is cached. `base_us`: the cost without
    load, of which `work_us` pass before the first token. Offers of one `kind` share that object. `fetching`: what the worker
    would fetch from others, if anything.
    """

    worker_id: str
    kind: OfferKind
    held_steps: int
    cached_tokens: int
    base_us: float
    work_us: float
    fetching: Fetching | None = None


class LookAlikes(NamedTuple):
    """The same offer to all workers of a likeness (`kvatlas.reservations.likeness`) that the ask does not name otherwise.

    `offer`: an offer without a worker id. `decode_us`: see `Limit`; the other limits of these workers are those that they
    reported.
    """

    likeness: bytes
    offer: Offer
    decode_us: float = 0.0


@dataclass(frozen=True, slots=True)
class PairLayout:
    """How the offers of an ask form pairs, in which one worker computes the prompt and another one the answer.

    The first `prefills` offers only compute the prompt, the next `decodes` offers only the answer, and all others compute both.
    `groups` holds a group number for each prefill offer. For each decode offer, `transfers_us` holds the time that it takes to
    move the prompt's KV there from each group; below 0: it can't be moved.
    """

    prefills: int
    decodes: int
    groups: Sequence[int]
    transfers_us: Sequence[Sequence[float]]


@dataclass(frozen=True, slots=True)
class Ask:
    """Asks for the cheapest of the `offers`, and of the offers to `look_alikes`, as of now. Ties go to the first offer, then to
    the next look-alike on the ring (`kvatlas.reservations.likeness`) from `ring` on.

    `again_factor`: the extra cost of a token that another worker is computing now, as a multiple of its price. If `limits` are
    absent, none are checked. If `pair_layout` is absent, one offer is chosen, not a pair.

    `skipped`: workers that get no offer as look-alikes. If the store knows fewer than `least_members` look-alikes, counting
    skipped workers and those with an offer of their own, the ask raises LookAlikesUnknown.

    `lookup`: what each look-alike holds is looked up. The offers to look-alikes are then those for workers that hold nothing,
    and the ask has no other offers. A lookup may name the only workers to consider. Such an ask may raise LookupImpossible, and
    needs reservations that `look_up`.
    """

    offers: Sequence[Offer]
    chains: Sequence[StepChain] = ()
    again_factor: float = 0.0
    limits: Limits | None = None
    pair_layout: PairLayout | None = None
    look_alikes: Sequence[LookAlikes] = ()
    skipped: Collection[str] = ()
    least_members: int = 0
    ring: int = 0
    lookup: Lookup | None = None


class LookAlikesUnknown(KvatlasError):
    """The store does not know the look-alikes of an ask, or too few of them."""


@dataclass(frozen=True, slots=True)
class Booking:
    """An ask whose cheapest offer is to be reserved, under an id that the router made (16 bytes, never used twice).

    The reservation lives as long as the router's lease, which this call renews, but no longer than `longest_us`. If a pair is
    chosen, `id` is the reservation of the worker that computes the answer, and `prefill_id` that of the worker that computes
    the prompt.

    If `waiting` is set, nothing is reserved if no worker has room or others come first: the request gets a place in the
    pool's queue instead (`kvatlas.reservations.pool_queue`).

    Raises InvalidValue for an id of a different length, an ask without offers, or a pair layout without a second id.
    """

    id: bytes
    router_id: str
    input_tokens: int
    ask: Ask
    lease_us: int
    longest_us: int
    prefill_id: bytes | None = None
    waiting: WaitingRequest | None = None

    def __post_init__(self) -> None:
        waiting_id = None if self.waiting is None else self.waiting.id
        for id in (self.id, self.prefill_id, waiting_id):
            if id is not None and len(id) != ID_BYTES:
                raise InvalidValue(f"reservation id of {len(id)} bytes; expected {ID_BYTES}")
        if self.ask.pair_layout is not None and self.prefill_id in (None, self.id):
            raise InvalidValue("a booking of a pair needs a second id, for the prefill")
        if not self.ask.offers and not self.ask.look_alikes:
            raise InvalidValue("a booking without offers; expected at least one worker")


class OfferEvaluation(NamedTuple):
    """The parts of an offer's cost: the reported and booked load, and the prefix that the worker is predicted to hold.

    `load_known` False: the worker's reported load is unknown or too old, and the mean of the others stands in for it.
    `predicted_tokens`: if above 0, the tokens that count as held after waiting `wait_us` longer than for the worker's backlog.
    `again_tokens`: tokens that another worker is computing now, and that this one would compute too. `over`: the limits that it
    would exceed (flags of `kvatlas.reservations.room_and_slo.Over`); `missed_us`: by how much it would miss the SLO.
    """

    load: Load
    load_known: bool = False
    predicted_tokens: int = 0
    wait_us: float = 0.0
    again_tokens: int = 0
    over: int = 0
    missed_us: float = 0.0


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The cheapest of the `offers`, and the parts of each offer's cost, in the same order.

    `offers`: those of the ask, then those to look-alikes, as far as the choice had to read them. With a pair layout, `chosen`
    computes the answer and `prefill` the prompt (None: `chosen` computes both). With a lookup, `worker_ids` lists the workers
    of the offers, and `held_tokens` what they hold. `source`: the worker from which the one that computes the prompt fetches;
    among those that its offer names, this is the one whose booked transfers end first.
    """

    chosen: int
    offers: Sequence[Offer]
    by_offer: Sequence[OfferEvaluation]
    prefill: int | None = None
    held_tokens: Sequence[int] = ()
    worker_ids: Sequence[str] = ()
    source: str | None = None

    @property
    def computing(self) -> int:
        """The offer whose worker computes the prompt."""
        return self.chosen if self.prefill is None else self.prefill

    @property
    def worker_id(self) -> str:
        """The chosen worker."""
        return self.worker_ids[self.chosen] if self.worker_ids else self.offers[self.chosen].worker_id


class Outcome(StrEnum):
    """The outcome of a reservation.

    `FINISHED`: its prompt was computed. `FAILED`: the prompt may not have been computed, so blocks that were still being
    computed are no longer believed. `BROKEN`: its engine failed; blocks that the engine had computed are no longer believed
    either, unless its events report them. `CALLED_OFF`: the call was not answered, so it is unknown whether the booking was
    made; if it arrives late, it is refused.
    """

    FINISHED = "finished"
    FAILED = "failed"
    BROKEN = "broken"
    CALLED_OFF = "called_off"


class BookingEnd(NamedTuple):
    """The first token of a reservation (`outcome` None), or its end. `output_tokens` None: unknown."""

    id: bytes
    outcome: Outcome | None
    output_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class LoadReport:
    """A worker's load sample, which is `age_us` old. `covers`: it includes the bookings that were made ARRIVAL_US before it was
    taken.

    `waiting`: requests whose prompts the engine had not begun. The sample says little about their tokens. Instead, the bookings
    of the newest requests keep counting: as many as are waiting, plus one that may be partly computed (`MemoryPool.cover`).
    """

    load: Load
    age_us: int = 0
    covers: bool = True
    waiting: int = 0


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """A worker's incarnation, and its load if it reports one.

    `likeness`: equal for look-alikes; empty if the worker currently gets no requests. `limit`: its request slots and its KV.
    """

    incarnation: int
    sample: LoadReport | None = None
    likeness: bytes = b""
    limit: Limit = UNKNOWN_LIMIT

    @classmethod
    def of(cls, record: FleetRecord, now_us: int) -> "WorkerReport":
        """The report that a fleet record contains. `now_us`: the time by the clock of the heartbeat's receiver, or by a clock
        that agrees with the worker's."""
        return cls(record.incarnation, _load_report(record, now_us), likeness_of(record), limit_of(record))


def _load_report(record: FleetRecord, now_us: int) -> LoadReport | None:
    if record.load is None:
        return None
    load = Load.of(record.load, record.endpoint.block_size or 1)
    if not record.load.sampled_us:  # sampled at an unknown time: it may include any of the bookings, or none
        return LoadReport(load, 0, covers=False)
    if record.load_age_us is None or not record.heard_us:
        age_us = max(0, now_us - record.load.sampled_us)
    else:
        age_us = max(0, now_us - record.heard_us) + record.load_age_us
    return LoadReport(load, age_us, waiting=record.load.forward_pass.requests_waiting)


class Reservations(Protocol):
    """The bookings of every router on every pool. All calls raise Unreachable; times are by the store's clock.

    Promises: `book` chooses and reserves in one step, so that all routers see each other's bookings. A fetch keeps its source
    busy for as long as it should take, whatever becomes of the request. A reservation ends when it is released, when its
    router's lease ends, when its worker is retired, or after its longest time, whichever comes first; ending it again changes
    nothing. A prediction ends when it is no longer believed, or when its request fails; a settled one also ends with the
    incarnation of its worker.

    If the store's clock goes back (because it is another server's clock, or was set), all bookings and predictions end with the
    next report. Otherwise they would count until the clock has caught up.
    """

    @property
    def fed_by_indexer(self) -> bool:
        """True: the indexer reports workers. False: the caller must `report` them."""

    @property
    def look_up(self) -> bool:
        """True if an ask may have a lookup, because the index is at hand."""

    async def evaluate(self, pool_id: str, ask: Ask) -> Evaluation:
        """What `book` would choose now. Books nothing. Raises LookAlikesUnknown or LookupImpossible."""

    async def book(self, pool_id: str, booking: Booking) -> Evaluation | None:
        """Reserve the cheapest offer. Returns None if the booking was cancelled before. If it is sent again, it replaces the
        first one. Raises LookAlikesUnknown or LookupImpossible and, for a request that may wait, MustWait or QueueIsFull; in
        these cases, nothing is reserved."""

    async def turns(
        self, pool_id: str, router_id: str, left: Collection[bytes], waiting: Sequence[WaitingRequest]
    ) -> Turns:
        """Which of a router's waiting requests may be tried now. They wait for as long as the router asks, at least once every
        `kvatlas.reservations.pool_queue.LEASE_US`. `left`: requests that are no longer waiting; `waiting`: some that still are,
        which are added if they are missing."""

    async def record_first_token(self, pool_id: str, id: bytes) -> bool:
        """Record that the request's first token has arrived. Returns False if the reservation does not exist, or if this has
        been recorded before."""

    async def release(self, pool_id: str, id: bytes, outcome: Outcome, output_tokens: int | None = None) -> bool:
        """End a reservation. Returns False if it does not (or no longer) exist. `output_tokens`: the number of tokens in the
        answer, if known; for the queue's fairness, they count in place of the estimate."""

    async def record_ends(self, pool_id: str, ends: Sequence[BookingEnd]) -> None:
        """Call `record_first_token` (outcome None) or `release` for many reservations, in order."""

    async def find_booked(self, pool_id: str, ids: Sequence[bytes]) -> set[bytes]:
        """Those of these reservations that have not been released. Some that recently ended on their own may be included."""

    async def renew_lease(self, pool_id: str, router_id: str, lease_us: int) -> bool:
        """Renew a router's lease. Returns False if it had expired, along with every reservation made under it."""

    async def end_lease(self, pool_id: str, router_id: str) -> None:
        """End a router's lease and all its reservations."""

    async def report(self, pool_id: str, reports: Mapping[str, WorkerReport]) -> None:
        """Report workers by id. Reports with a lower incarnation than the last one, and older samples, are late and
        ignored. A higher incarnation ends the worker's predictions, except for prompts that are being computed. Bookings
        stay, because every snapshot begins an incarnation while the engine's requests continue."""

    async def forget(self, pool_id: str, worker_id: str) -> None:
        """Forget a worker that is gone, along with all its bookings, predictions and learned rates."""

    async def add_evidence(self, pool_id: str, evidence: Mapping[str, Evidence]) -> None:
        """Add evidence of workers' rates to that of all routers. Evidence of workers that have never been reported is
        dropped."""

    async def read_evidence(self, pool_id: str) -> Mapping[str, Evidence]:
        """The evidence of all routers about workers' rates; workers without evidence are absent."""
