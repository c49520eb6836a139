"""The counters of the endpoint picker."""

from dataclasses import dataclass, field

from kvatlas.telemetry.distribution import Distribution


@dataclass(slots=True)
class GatewayCounters:
    """Plain integers since the process started.

    Each request that a gateway asks about is either picked by `by_prompt` (what it holds of the prompt counts),
    `by_load` (its prompt is not known: no completion, too long, not in time), `unpublished` (a pod that nobody publishes for),
    or refused: `refused` (nobody can take it), `shed` and `queue_full` (too much to do), and `late` (no decision in time).
    `undecided`: it ended before that. `queued`: waited for a worker with room.

    Of the picked ones `answered` (status 2xx, to the end), `failed` (another status), `left` (the answer went on without the
    picker), and `gone` (the client, the gateway or the engine went away first). `served_elsewhere`: answered by a fallback.
    `out_of_order`: streams ended for a message that can't come; `observed`: for a filter that only observes. `no_address`:
    times that a worker was found whose address no gateway can use. `pick_time`: seconds from a request's reading to its
    decision.
    """

    by_prompt: int = 0
    by_load: int = 0
    unpublished: int = 0
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

    @property
    def in_flight(self) -> int:
        """Requests with an endpoint whose end is not known yet."""
        picked = self.by_prompt + self.by_load + self.unpublished
        return picked - self.answered - self.failed - self.left - self.gone


@dataclass(frozen=True, slots=True)
class GatewayGauges:
    """Requests of a picker now."""

    in_flight: int
    waiting: int
