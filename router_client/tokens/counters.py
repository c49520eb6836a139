"""What is counted of requests' token ids."""

from dataclasses import dataclass


@dataclass(slots=True)
class TokenCounters:
    """How requests came by their token ids: plain integers since the router began.

    `tokenized`, `given` (token ids in the request itself), and those without tokens by reason: `late`, `busy`,
    `unsupported`, `failed`.
    """

    tokenized: int = 0
    given: int = 0
    late: int = 0
    busy: int = 0
    unsupported: int = 0
    failed: int = 0
    time_us: int = 0

    def findings(self) -> list[str]:
        """What somebody should look at, a line each; empty where nothing is."""
        without = self.late + self.busy + self.failed
        if without <= self.tokenized // 20:
            return []
        return [
            f"{without} requests were routed without their tokens ({self.late} late, {self.busy} too many at once, "
            f"{self.failed} failed)"
        ]
