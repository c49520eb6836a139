"""The counters of the proxy."""

from dataclasses import dataclass, field

from kvatlas.telemetry.distribution import Distribution
from kvatlas_router.continuation.reasons import Why


@dataclass(slots=True)
class ContinuationCounters:
    """Plain integers since the router started: streams whose engine died mid-answer. `resumed`: how often another worker
    continued. The others ended with an error, and are counted by `Why`."""

    resumed: int = 0
    sampled: int = 0
    choices: int = 0
    beams: int = 0
    echo: int = 0
    guided: int = 0
    audio: int = 0
    penalties: int = 0
    template: int = 0
    tokens: int = 0
    object: int = 0
    reasoning: int = 0
    tool_call: int = 0
    long: int = 0
    unreadable: int = 0
    diverged: int = 0
    same_token: int = 0
    refused: int = 0
    no_worker: int = 0

    def count(self, why: Why) -> None:
        """Count an answer that could not be continued."""
        setattr(self, why.value, getattr(self, why.value) + 1)


@dataclass(slots=True)
class ProxyCounters:
    """Plain integers since the proxy started.

    `requests`: requests received for engines. They end as `answered` (2xx), `refused_by_engine` (the engine's refusal was
    passed on, or its answer had an event that is too long for the client), `gave_up` (no worker was left), `gone` (the client
    disconnected first), `broken` (the engine disappeared mid-answer, or reported an error there) or `cut` (still running when
    the proxy stopped). `refused` and `unreachable`: attempts that failed because the engine couldn't serve them, or did not
    answer. `retried`: attempts after the first; `retries_denied`: retries that the budget did not allow. `untokenized`:
    requests routed without all of their tokens: by load, or by the tokens before the first image. `shed`: refused because
    every engine would miss the SLO by far. `queued`: had to wait for a worker with room; `queue_full`: refused because the
    queue was full or the wait was too long. `apart`: attempts with a separate prefill worker; `apart_failed`: those that
    failed because of that worker. `fetching`: attempts whose engine should fetch KV from another one. `sent`: attempts sent;
    `overhead`: seconds from a request's arrival to its sending. `held`, `held_done`, `held_expired`: see
    `kvatlas_router.held_bookings.HeldCounters`; `done_elsewhere`: reported ends of other routers' bookings. `continued`:
    streams whose engine died.
    """

    requests: int = 0
    answered: int = 0
    refused_by_engine: int = 0
    gave_up: int = 0
    gone: int = 0
    broken: int = 0
    cut: int = 0
    refused: int = 0
    unreachable: int = 0
    retried: int = 0
    retries_denied: int = 0
    untokenized: int = 0
    shed: int = 0
    queued: int = 0
    queue_full: int = 0
    apart: int = 0
    apart_failed: int = 0
    fetching: int = 0
    sent: int = 0
    overhead: Distribution = field(default_factory=Distribution)
    ttft: Distribution = field(default_factory=Distribution)
    request_time: Distribution = field(default_factory=Distribution)
    held: int = 0
    held_done: int = 0
    held_expired: int = 0
    done_elsewhere: int = 0
    continued: ContinuationCounters = field(default_factory=ContinuationCounters)
