"""Costs: the plan of a worker's work for a request, and the profile that prices this plan term by term.

Objects that are created for each worker in each choice are named tuples, because these take a third of the time of frozen
dataclasses.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from kvatlas.blocks.tiers import Tier
from kvatlas.errors import InvalidValue
from kvatlas.fleet.records import WorkerState

MIB_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class ReadRate:
    """The time that it takes to read one contiguous piece from a tier: `setup_us` once, and `us_per_mib` for its size."""

    setup_us: float
    us_per_mib: float

    def __post_init__(self) -> None:
        if not (self.setup_us >= 0 and self.us_per_mib >= 0):
            raise InvalidValue(f"read rate {self}; expected no negative number")


class Piece(NamedTuple):
    """A contiguous run of cached tokens that is read in one go, from one tier of one worker.

    `own`: the candidate itself holds it. `same_domain`: its holder is the candidate or is in the candidate's locality domain.
    `bytes` 0: the block size is unknown. `rate`: the read rate that its holder states; None: the reader's rate for the tier
    applies.
    """

    tokens: int
    bytes: int
    tier: Tier
    own: bool = True
    same_domain: bool = True
    rate: ReadRate | None = None

    @property
    def price_tier(self) -> Tier:
        """The tier that determines the price: another worker's HBM counts as remote HBM."""
        return Tier.REMOTE_HBM if self.tier is Tier.HBM and not self.own else self.tier

    @property
    def at_hand(self) -> bool:
        """True if the piece is in the candidate's own HBM, so that nothing is transferred."""
        return self.own and self.tier is Tier.HBM

    @property
    def mib(self) -> int:
        """The size in MiB, rounded up, and at least 1."""
        return max(1, -(-self.bytes // MIB_BYTES))


class Load(NamedTuple):
    """How busy a worker is, to the extent that it affects costs.

    `waiting_requests`: requests whose tokens are not in `queued_prefill_tokens` because the engine does not report them.
    `kv_tokens`: the number of tokens whose KV the worker's running requests hold.
    """

    running_decodes: int = 0
    queued_prefill_tokens: int = 0
    waiting_requests: int = 0
    kv_tokens: int = 0

    @classmethod
    def of(cls, state: WorkerState, block_size: int) -> "Load":
        """The load according to a worker's reported state; if that lists no running decodes, the occupied request slots
        count."""
        forward = state.forward_pass
        return cls(
            running_decodes=state.running_decodes or forward.active_request_slots,
            queued_prefill_tokens=state.queued_prefill_tokens,
            waiting_requests=0 if state.queued_prefill_tokens else forward.requests_waiting,
            kv_tokens=forward.active_kv_blocks * block_size,
        )

    def __add__(self, other: "Load") -> "Load":  # type: ignore[override]  # loads add up, they are not joined
        return Load(
            self.running_decodes + other.running_decodes,
            self.queued_prefill_tokens + other.queued_prefill_tokens,
            self.waiting_requests + other.waiting_requests,
            self.kv_tokens + other.kv_tokens,
        )


def mean_load(loads: Sequence[Load]) -> Load:
    """The mean of the known loads, rounded up, to stand in for an unknown load. Idle if no load is known."""
    if not loads:
        return Load()
    count = len(loads)
    return Load(
        -(-sum(load.running_decodes for load in loads) // count),
        -(-sum(load.queued_prefill_tokens for load in loads) // count),
        -(-sum(load.waiting_requests for load in loads) // count),
        -(-sum(load.kv_tokens for load in loads) // count),
    )


class Plan(NamedTuple):
    """One worker's work for one request: read the `pieces`, compute the rest of the prompt, then decode."""

    worker_id: str
    input_tokens: int
    output_tokens: int
    pieces: Sequence[Piece] = ()
    load: Load = Load()

    @property
    def cached_tokens(self) -> int:
        return sum([piece.tokens for piece in self.pieces])

    @property
    def new_tokens(self) -> int:
        """The number of prompt tokens to compute."""
        return self.input_tokens - self.cached_tokens


class Prices(NamedTuple):
    """How many microseconds load and cached tokens add to a plan's cost or take off it, computed without pricing the plan
    again.

    Load is counted in queued tokens (a waiting request counts as `waiting_tokens` of them), running requests, and tokens of
    their KV. n cached tokens in the worker's own HBM save `token_us` × n + `token_squared_us` × n^2 - `hit_us`.
    """

    queued_us: float
    running_us: float
    kv_us: float
    waiting_tokens: int
    token_us: float
    token_squared_us: float = 0.0
    hit_us: float = 0.0


@dataclass(frozen=True, slots=True)
class CostTerm:
    """One summand of a score: `us` for `amount` of `unit` ("tokens", "MiB", ...)."""

    name: str
    us: int
    amount: int
    unit: str

    def __str__(self) -> str:
        return f"{self.name} {self.us} us ({self.amount} {self.unit})"


@dataclass(frozen=True, slots=True, eq=False)
class TermKind:
    """The name of a profile's n-th term, and the unit of its amount. There is one object for each."""

    name: str
    unit: str


class Cost(NamedTuple):
    """A price: its terms and their sum and, if the profile predicts them, the times to the first token and to each next one.

    Terms are stored as columns and only built when needed, because a router prices every worker but reads the terms of just a
    few.
    """

    profile: str
    kinds: tuple[TermKind, ...]
    us: tuple[int, ...]
    amounts: tuple[int, ...]
    score_us: int
    ttft_us: int | None = None
    tpot_us: int | None = None

    @property
    def terms(self) -> tuple[CostTerm, ...]:
        """The summands of the score, in the profile's order."""
        columns = zip(self.kinds, self.us, self.amounts, strict=True)
        return tuple(CostTerm(kind.name, us, amount, kind.unit) for kind, us, amount in columns)

    def plus(self, kind: TermKind, us: float, amount: int, *, delays: bool = False) -> "Cost":
        """The cost with one more term. `delays`: this term's time passes before the first token."""
        more = round(us)
        ttft_us = self.ttft_us + more if delays and self.ttft_us is not None else self.ttft_us
        return Cost(
            self.profile,
            (*self.kinds, kind),
            (*self.us, more),
            (*self.amounts, amount),
            self.score_us + more,
            ttft_us,
            self.tpot_us,
        )

    def explain(self) -> str:
        """`<score> us = term + term + ...`, without the terms that are zero."""
        terms = " + ".join(str(term) for term in self.terms if term.us) or "nothing"
        return f"{self.score_us} us = {terms}"


class CostProfile(Protocol):
    """A way to price a plan.

    Promises: it is pure (the same plan always costs the same); the terms are not negative and sum to the score; every plan has
    the same terms in the same order, so that costs can be compared term by term; with all else equal, fewer new tokens never
    cost more.
    """

    @property
    def name(self) -> str:
        """The profile's name, as users choose it."""

    def price(self, plan: Plan) -> Cost:
        """The cost of a plan, in whole microseconds."""

    def prices(self, plan: Plan) -> Prices:
        """How load and cached tokens change the plan's cost, whatever its pieces are; `price` agrees except for rounding."""

    def alike(self, worker_id: str) -> Hashable:
        """A key that is equal for workers with equal prices."""
