"""Counters of requests' token ids."""

from dataclasses import dataclass, field

from kvatlas.telemetry.distribution import Distribution


@dataclass
class TokenCounters:
    """Where requests' token ids came from: plain integers since the router started.

    `tokenized`, `given` (token ids in the request itself), and requests without token ids by reason: `late`, `busy`,
    `unsupported`, `failed`, `no_engine` (there was no engine to ask; such a request has no worker either). `reading_time`:
    seconds spent waiting for tokenizers.
    """

    tokenized: int = 0
    given: int = 0
    late: int = 0
    busy: int = 0
    unsupported: int = 0
    failed: int = 0
    no_engine: int = 0
    reading_time: Distribution = field(default_factory=Distribution)

    def __post_init__(self) -> None:
        self.last_failure = ""
        """The reason of the last failure to get token ids."""

    def findings(self) -> list[str]:
        """Problems that need attention, one line each."""
        without = self.late + self.busy + self.failed
        if without <= self.tokenized // 20:
            return []
        line = (
            f"{without} requests were routed without their tokens ({self.late} late, {self.busy} too many at once, "
            f"{self.failed} failed)"
        )
        return [f"{line}; last: {self.last_failure}" if self.last_failure else line]
