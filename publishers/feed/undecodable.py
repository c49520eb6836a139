"""Handles an engine's undecodable payloads and events.

Any process may send to the feed's socket. If a foreign message took a seq, the engine's own message of that seq would look as
if another engine process had sent it, and all known blocks would be dropped. So an undecodable payload is set aside until the
next message shows whether its seq was the engine's.

An undecodable or oversized payload may have been a removal. Claiming too little is safe; claiming a block that is gone is not.
So all known blocks are dropped, and the worker starts again, empty. For a single unreadable event, only the blocks it names are
dropped; a removal that names none drops everything. An event of an unknown kind that names no blocks drops everything only with
`--distrust-poison`: otherwise an engine with a new kind of event would hardly ever publish. Each drop costs the index a new
incarnation, so drops are rationed: an engine that keeps causing them is ignored for a while, and the worker claims nothing.
"""

from collections import deque
from collections.abc import Sequence

from xxhash import xxh3_128_digest

from kvatlas.errors import EngineEventError
from kvatlas.runtime.rate_limited_log import RateLimitedLog
from kvatlas_publishers.counters import PublisherCounters
from kvatlas_publishers.diagnoses import Diagnoses
from kvatlas_publishers.engines import MAX_PAYLOAD_BYTES
from kvatlas_publishers.feed.continuity import Batch
from kvatlas_publishers.feed.dead_letters import DeadLetters

STARTING_OVER = "dropping all known blocks and starting a new incarnation"
MAX_ASIDE = 64
REMEMBERED_PAYLOADS = 256

BURST = 8
"""Number of losses handled immediately. A few bad payloads in a long replay then cost only the blocks stored before the last
of them."""
RATION_S = 15.0
"""After a burst, at most one loss is handled in each period of this length."""


class UndecodableQueue:
    """Payloads that were set aside and that would have come next, without a gap in seq (pure)."""

    def __init__(self) -> None:
        self._aside: list[Batch] = []

    def put(self, seq: int, payload: bytes, last_seq: int | None) -> None:
        """Set a payload aside. `last_seq`: the last seq taken; None: none yet."""
        next_seq = self._aside[-1][0] + 1 if self._aside else None
        if seq == next_seq:
            self._aside = [*self._aside, (seq, payload)][-MAX_ASIDE:]
        elif seq == (0 if last_seq is None else last_seq + 1):
            self._aside = [(seq, payload)]

    def take_before(self, seq: int) -> Sequence[Batch]:
        """Handle a readable message with this seq. Returns the payloads that lead up to it: these came from the engine;
        all others did not."""
        aside, self._aside = self._aside, []
        if not aside or aside[-1][0] < seq - 1:
            return []
        return [(aside_seq, payload) for aside_seq, payload in aside if aside_seq < seq]


class Distrust:
    """Limits how often all known blocks are dropped (pure; times are in seconds on the caller's clock). Batches are taken
    only while the feed `is_trusted`."""

    def __init__(self, burst: int = BURST, ration_s: float = RATION_S) -> None:
        self._burst = burst
        self._ration_s = ration_s
        self._left = float(burst)
        self._at_s: float | None = None
        self._trusted = True

    def record_loss(self, now_s: float) -> bool:
        """Record that something undecodable may have removed blocks. Returns True if all known blocks must be dropped; False
        while the feed is not trusted, because nothing is held then."""
        if not self.is_trusted(now_s):
            return False
        self._left -= 1.0
        self._trusted = self._left >= 1.0
        return True

    def is_trusted(self, now_s: float) -> bool:
        """True if batches from the engine may be taken now."""
        if self._at_s is not None:
            self._left = min(float(self._burst), self._left + max(0.0, now_s - self._at_s) / self._ration_s)
        self._at_s = now_s
        if self._left >= 1.0:
            self._trusted = True
        return self._trusted


class UndecodableRecorder:
    """Counts undecodable payloads, keeps them as dead letters and logs them."""

    def __init__(
        self,
        counters: PublisherCounters,
        dead_letters: DeadLetters,
        log: RateLimitedLog,
        diagnoses: Diagnoses,
    ) -> None:
        self._counters = counters
        self._dead_letters = dead_letters
        self._log = log
        self._diagnoses = diagnoses
        self._recorded: deque[bytes] = deque(maxlen=REMEMBERED_PAYLOADS)

    def record_payload(self, seq: int, payload: bytes, error: EngineEventError) -> None:
        """Record a payload that is not a batch. If it is offered again (set aside, or replayed), it is not recorded twice."""
        digest = xxh3_128_digest(payload)
        if digest in self._recorded:
            return
        self._recorded.append(digest)
        if len(payload) > MAX_PAYLOAD_BYTES:
            self._counters.poison_oversized += 1
        else:
            self._counters.poison_malformed += 1
        self._record(str(error), seq, payload)

    def record_message(self, why: str, seq: int | None, payload: bytes) -> None:
        """Record a message whose frames or seq are wrong, so that no engine sent it."""
        self._counters.poison_frames += 1
        self._record(why, seq, payload)

    def _record(self, why: str, seq: int | None, payload: bytes) -> None:
        self._counters.poison += 1
        self._diagnoses.last_unreadable = why
        if not self._dead_letters.keep(why, seq, payload):
            self._counters.dead_letters_dropped += 1
        place = "" if seq is None else f" {seq}"
        self._log.report("undecodable", f"skipped feed message{place}: {why}")
