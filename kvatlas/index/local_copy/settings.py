"""Settings of a local copy."""

from dataclasses import dataclass
from math import inf
from pathlib import Path

from kvatlas.bus.access import NatsAccess
from kvatlas.errors import InvalidValue

MAX_STALE_MS = 1_000.0
MAX_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class ReplicaSettings:
    """A copy of the index in this process, fed from `nats` (the access, or just the URL).

    `max_stale_ms`: the store answers while the copy may be older than this. `max_bytes`: the store answers if the copy would
    take more memory than this, as estimated from its blocks. `file`: the file that keeps the copy across restarts; None: it is
    not kept.
    """

    nats: NatsAccess | str
    max_stale_ms: float = MAX_STALE_MS
    max_bytes: int = MAX_BYTES
    file: Path | None = None

    def __post_init__(self) -> None:
        if not 0 < self.max_stale_ms < inf:
            raise InvalidValue(f"replica setting max_stale_ms is {self.max_stale_ms}; expected more than 0")
        if self.max_bytes <= 0:
            raise InvalidValue(f"replica setting max_bytes is {self.max_bytes}; expected more than 0")
