"""Counters of requests' token ids."""

from dataclasses import dataclass


@dataclass(slots=True)
class TokenCounters:
    """Where requests' token ids came from: plain integers since the router started.

    `tokenized`, `given` (token ids in the request itself), and requests without token ids by reason: `late`, `busy`,
    `unsupported`, `failed`. `time_us`: spent waiting for tokenizers.
    """

    tokenized: int = 0
    given: int = 0
    late: int = 0
    busy: int = 0
    unsupported: int = 0
    failed: int = 0
    time_us: int = 0

    def findings(self) -> list[str]:
        """Problems that need attention, a line each."""
        without = self.late + self.busy + self.failed
        if without <= self.tokenized // 20:
            return []
        return [
            f"{without} requests were routed without their tokens ({self.late} late, {self.busy} too many at once, "
            f"{self.failed} failed)"
        ]
