"""Requests that wait for a worker with room: what a router sends about them, and what it learns in return.

The order of a pool's waiting requests is decided in one place (`kvatlas.reservations.pool_queue`), for all routers.
"""

from collections.abc import Collection, Mapping
from dataclasses import field, replace
from enum import StrEnum
from hashlib import blake2b
from typing import NamedTuple

from kvatlas.dataclass import dataclass
from kvatlas.errors import KvatlasError

MOST_LANE_WORKERS = 64
"""A request that may go to more workers than this, but not to all, waits as if it could go to all."""
MOST_PRIORITY = (1 << 31) - 1
LEAST_WEIGHT, MOST_WEIGHT = 0.001, 1_000.0
ALL_WORKERS = "0" * 16
"""The lane of requests that may go to every worker of their pool."""

UNCACHED_UNITS, CACHED_UNITS, OUTPUT_UNITS = 10, 1, 20
"""The service that one token takes, in tenths of a prompt token that has to be computed. An output token counts double (VTC:
Sheng et al., Fairness in Serving LLMs, 2024). A cached token counts for a tenth, so that a tenant is not charged for what its
locality saves (Cao et al., Locality-aware Fair Scheduling in LLM Serving, 2025)."""


class QueueLimits(NamedTuple):
    """Limits of a pool's queue: how many requests may wait, and how many tokens their prompts may have."""

    requests: int
    tokens: int


def units(uncached_tokens: int, cached_tokens: int, output_tokens: int) -> int:
    """How much service a request takes."""
    return UNCACHED_UNITS * uncached_tokens + CACHED_UNITS * cached_tokens + OUTPUT_UNITS * output_tokens


def digest(name: str) -> str:
    """A name of any length, as 16 hex digits."""
    return blake2b(name.encode(errors="surrogatepass"), digest_size=8).hexdigest()


@dataclass(frozen=True, slots=True)
class WaitingRequest:
    """A request that may wait. `id`: 16 bytes, the same each time it is tried.

    `priority`: the lower one goes first. `weight`: the tenant's share of the pool, relative to other tenants. `program`: the
    agent or conversation that it belongs to; empty if unknown. `age_us`: how long ago it arrived; `left_us`: how long it may
    still wait. `workers`: those that it may go to; None: all workers of its pool, or too many to name. `may_wait` False: its
    tenant is only charged, as it is for another attempt at a request that has already been booked once.
    """

    id: bytes
    tenant: str
    limits: QueueLimits
    input_tokens: int
    output_tokens: int = 0
    priority: int = 0
    weight: float = 1.0
    program: str = ""
    age_us: int = 0
    left_us: int = 30_000_000
    workers: frozenset[str] | None = None
    may_wait: bool = True

    def among(self, workers: Collection[str]) -> "WaitingRequest":
        """The same request, restricted to these workers."""
        return replace(self, workers=frozenset(workers) if len(workers) <= MOST_LANE_WORKERS else None)

    @property
    def lane(self) -> str:
        """The lane of the request: requests in one lane may go to the same workers."""
        return ALL_WORKERS if self.workers is None else digest("\0".join(sorted(self.workers)))

    @property
    def weight_milli(self) -> int:
        """The weight in thousandths."""
        return round(1_000 * min(max(self.weight, LEAST_WEIGHT), MOST_WEIGHT))

    @property
    def rank(self) -> int:
        """The priority as a number from 0."""
        return min(max(self.priority, -MOST_PRIORITY), MOST_PRIORITY) + MOST_PRIORITY

    @property
    def expected_units(self) -> int:
        """The service that the request will take if none of its prompt is cached."""
        return units(self.input_tokens, 0, self.output_tokens)


class WaitReason(StrEnum):
    """Why a request is waiting. `FULL`: none of the workers that it may go to has room. `TURN`: others go first."""

    FULL = "full"
    TURN = "turn"


@dataclass(frozen=True, slots=True)
class Place:
    """A place in the queue. `ahead`: roughly how many requests go first; `requests` and `tokens`: how many are waiting in the
    pool in total, including this request."""

    reason: WaitReason
    ahead: int
    requests: int
    tokens: int


class MustWait(KvatlasError):
    """The request was not booked: it has a place in its pool's queue, and will get its turn later.

    `request`: the waiting request, if known; `filed`: False if the store has yet to give it a place, because it
    answered too late; `alone`: it is waiting in the queue of a single router, which decides without the store.
    """

    def __init__(self, place: Place, request: WaitingRequest | None = None, *, filed: bool = True) -> None:
        super().__init__(f"waits for its turn behind about {place.ahead} requests")
        self.place = place
        self.request = request
        self.filed = filed
        self.alone = False


class QueueIsFull(KvatlasError):
    """The request was not booked, and may not wait. `requests`, `tokens`: how many are waiting."""

    def __init__(self, requests: int, tokens: int) -> None:
        super().__init__(f"every worker is full, and {requests} requests of {tokens} tokens wait already")
        self.requests = requests
        self.tokens = tokens


@dataclass(frozen=True, slots=True)
class Turns:
    """The state of a pool's queue for one router. `own`: how many of its requests are waiting; `requests`, `tokens`: how many
    are waiting in total.

    `refused`: its new requests that may not wait. `turns`: its requests that may be tried now, each with the workers that it
    must leave to others. `near`: one of its requests is among those that may be tried soon.
    """

    own: int
    requests: int
    tokens: int
    refused: frozenset[bytes] = frozenset()
    turns: Mapping[bytes, frozenset[str]] = field(default_factory=dict)
    near: bool = False
