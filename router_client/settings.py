"""A router's settings."""

from dataclasses import dataclass, field
from enum import StrEnum
from math import inf

from kvatlas.blocks.reuse import ReuseRules
from kvatlas.cost import CostProfile, EngineProfile
from kvatlas.errors import InvalidValue
from kvatlas.index.local_copy.settings import ReplicaSettings
from kvatlas.request import Fallbacks
from router_client.decision.selector import Selector
from router_client.decision.shadow_policy import Policy
from router_client.fleet_cache import MAX_AGE_MS


@dataclass(frozen=True, slots=True)
class BookingSettings:
    """Settings for routers' bookings on a pool's workers, which make many routers decide like one.

    `reservations=False`: nothing is booked, and the load is only what workers report. `prefixes_in_flight=False`: a prompt
    that a worker is computing does not count until its events confirm it. `again_factor`: the cost of computing a prefix that
    another worker is computing right now, as a multiple of its prefill: 1 adds the duplicated work once more.
    `interference_factor`: the cost of a microsecond of another request's delay, as a multiple of one of this request's own;
    computing a prompt delays each request that its worker is answering. `lease_s`: for how many seconds a router's
    reservations outlive it; `longest_s`: the maximum lifetime of a reservation.

    A prediction is trusted for `confirm_s` after its prefill, until the engine's events confirm it. A worker without events is
    believed to hold what it computed for `predicted_s` after its last use, up to `predicted_capacity_blocks` if it does not
    report the size of its cache.
    """

    reservations: bool = True
    prefixes_in_flight: bool = True
    again_factor: float = 1.0
    interference_factor: float = 0.4
    lease_s: float = 5.0
    longest_s: float = 3_600.0
    confirm_s: float = 5.0
    predicted_s: float = 300.0
    predicted_capacity_blocks: int = 4_096


class SloMode(StrEnum):
    """The effect of an SLO on a choice. `TOLD`: no effect; results only report whether it is missed. `PENALTY`: the
    time by which it is missed is added to the cost. `FILTER`: a worker that misses it is left out, unless all workers
    miss it."""

    TOLD = "told"
    PENALTY = "penalty"
    FILTER = "filter"


@dataclass(frozen=True, slots=True)
class LimitSettings:
    """Which workers are left out while others remain.

    `room`: workers that report no free request slots, or too little free KV for the prompt's new tokens. `slo`: workers that
    would miss the request's SLO, depending on the mode; `slo_factor`: the penalty for each microsecond by which it is missed.
    `shed_factor`: the advice is to shed if every worker takes more than this many times the SLO's time to first token; at 1, a
    request that can't be served in time makes way for others.
    """

    room: bool = True
    slo: SloMode = SloMode.TOLD
    slo_factor: float = 1.0
    shed_factor: float = 1.0


@dataclass(frozen=True, slots=True)
class LearningSettings:
    """`on`: rates are learned from finished requests (profile `engine` only), and shared every `every_s`."""

    on: bool = True
    every_s: float = 1.0


@dataclass(frozen=True, slots=True)
class PairSettings:
    """Settings for `route_pd`. `least_new_tokens`: a worker that would have to compute fewer tokens of a prompt than this
    gets no prefill worker."""

    least_new_tokens: int = 512


@dataclass(frozen=True, slots=True)
class RouterSettings:
    """Settings for how a router ranks and chooses. `fallbacks` complete requests that are given as hints; `rules` define what
    engines reuse.

    `fleet_max_age_ms`: how long a pool's records are kept. `deadline_ms`: how long a decision may wait for the store before it
    falls open (None: no limit); if the store's answers take longer than that, up to `most_deadline_ms`. `load_only`: the index
    is not used at all. `follow`: another policy decides, and the worker that cost would choose is only recorded. `seed`
    decides how ties are broken. `router_id` names this router's lease; the default is the host's name plus random digits.

    `limits`: which workers are left out because they are full or too slow. `pairs`: when a prefill worker computes the prompt.
    `select`: which workers may get requests at all; a request may narrow this further (`Prompt.select`). `session_us`: the
    cost of moving a session to another worker; 0: sessions are ignored. `temperature`: 0 chooses the cheapest; above 0, more
    expensive workers get requests too (`router_client.pricing.surcharges`). `explain_all`: every choice reads the load of
    every candidate, so that it can be explained in full; otherwise a choice among more than 16 candidates reads only those
    that it needs. `replica`: overlaps are answered from a copy of the index in this process, which is updated from the event
    stream; applies only to a client that was opened from a URL.
    """

    profile: CostProfile = field(default_factory=EngineProfile)
    rules: ReuseRules = field(default_factory=ReuseRules)
    fallbacks: Fallbacks = field(default_factory=Fallbacks)
    fleet_max_age_ms: float = MAX_AGE_MS
    booking: BookingSettings = field(default_factory=BookingSettings)
    learning: LearningSettings = field(default_factory=LearningSettings)
    deadline_ms: float | None = 10.0
    most_deadline_ms: float = 100.0
    load_only: bool = False
    follow: Policy | None = None
    seed: int = 0
    router_id: str | None = None
    limits: LimitSettings = field(default_factory=LimitSettings)
    pairs: PairSettings = field(default_factory=PairSettings)
    select: Selector | None = None
    session_us: float = 0.0
    temperature: float = 0.0
    explain_all: bool = False
    replica: ReplicaSettings | None = None

    def __post_init__(self) -> None:
        for name in ("session_us", "temperature"):
            if not 0 <= getattr(self, name) < inf:
                raise InvalidValue(f"router setting {name} is {getattr(self, name)}; expected 0 or more")
