"""The counters of the endpoint picker."""

from dataclasses import dataclass, field

from kvatlas.telemetry.distribution import Distribution
from router_client.learning.condition import RequestEnds


@dataclass(slots=True)
class GatewayCounters:
    """Plain integers since the process started.

    An endpoint for a gateway's request is picked `by_prompt` (overlap with the prompt), `by_load` (the prompt is unknown: not
    a completion, too long, or not read in time), or as `unpublished` (a pod without a publisher). Otherwise the request is
    refused: `invalid` (its client's fault), `refused` (no worker can take it), `shed` or `queue_full` (overload), or `late`
    (no decision in time). `undecided`: it ended before a decision. `queued`: it waited for a worker with room.

    Picked requests end as `answered` (status 2xx, complete), `failed` (another status), `left` (the answer bypassed the
    picker), or `gone` (the client, gateway or engine disconnected first). `served_elsewhere`: a fallback answered.
    `out_of_order`: streams ended because of a protocol violation; `observed`: streams ended because the filter only observes.
    `no_address`: how often a worker was found whose address no gateway can use. `pick_time`: seconds from reading a request
    to deciding on it.
    """

    by_prompt: int = 0
    by_load: int = 0
    unpublished: int = 0
    invalid: int = 0
    refused: int = 0
    shed: int = 0
    queued: int = 0
    queue_full: int = 0
    late: int = 0
    undecided: int = 0
    answered: int = 0
    failed: int = 0
    left: int = 0
    gone: int = 0
    served_elsewhere: int = 0
    out_of_order: int = 0
    observed: int = 0
    no_address: int = 0
    pick_time: Distribution = field(default_factory=Distribution)

    def read_ends(self) -> RequestEnds:
        """The ended requests, as reported by the picker's router."""
        picked = self.by_prompt + self.by_load + self.unpublished
        lost = self.refused + self.shed + self.queue_full + self.late
        return RequestEnds(picked + lost, lost, self.gone)

    @property
    def in_flight(self) -> int:
        """Picked requests that have not ended."""
        picked = self.by_prompt + self.by_load + self.unpublished
        return picked - self.answered - self.failed - self.left - self.gone


@dataclass(frozen=True, slots=True)
class GatewayGauges:
    """A picker's current requests."""

    in_flight: int
    waiting: int
    pool_waiting: int
