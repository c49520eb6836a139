"""What to do about payloads and events of an engine that can't be decoded.

Anybody may send to the feed's socket. A foreign message that took a seq would make the engine's own message of that seq
look like one of another engine process, and everything held would be dropped. So an undecodable payload is set aside: the next
message shows whether its seq was the engine's.

An undecodable payload, or one that is too large, may have been a removal: to claim less is safe, to claim a block that is gone
is not. So everything held is dropped then, and the worker begins again, empty. Of an event that can't be read the blocks that
it names are dropped, and only if it is a removal that names none, everything. An event of an unknown kind that names no blocks
drops everything with `--distrust-poison`; by default not, or an engine with a new kind of event would hardly ever count. Each
time costs the index a new incarnation, so it is rationed: an engine that goes on like that is ignored for a while, and the
worker claims nothing.
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
"""Losses that are answered at once: a few bad payloads in a long replay cost what was stored before the last of them only."""
RATION_S = 15.0
"""One more is answered after each."""


class UndecodableQueue:
    """Payloads set aside that would have been the next ones in order, by seq without a gap (pure)."""

    def __init__(self) -> None:
        self._aside: list[Batch] = []

    def put(self, seq: int, payload: bytes, last_seq: int | None) -> None:
        """Set a payload aside. `last_seq`: the last that was taken, None for none."""
        next_seq = self._aside[-1][0] + 1 if self._aside else None
        if seq == next_seq:
            self._aside = [*self._aside, (seq, payload)][-MAX_ASIDE:]
        elif seq == (0 if last_seq is None else last_seq + 1):
            self._aside = [(seq, payload)]

    def take_before(self, seq: int) -> Sequence[Batch]:
        """A good message of this seq came: the payloads that lead up to it were the engine's, all others were not."""
        aside, self._aside = self._aside, []
        if not aside or aside[-1][0] < seq - 1:
            return []
        return [(aside_seq, payload) for aside_seq, payload in aside if aside_seq < seq]


class Distrust:
    """Rations how often everything held is dropped (pure; times are the caller's seconds). A batch is only taken while the
    feed `is_trusted`."""

    def __init__(self, burst: int = BURST, ration_s: float = RATION_S) -> None:
        self._burst = burst
        self._ration_s = ration_s
        self._left = float(burst)
        self._at_s: float | None = None
        self._trusted = True

    def record_loss(self, now_s: float) -> bool:
        """Something undecodable may have removed blocks. True if everything held is to be dropped; False while the feed is not
        trusted: nothing is held then."""
        if not self.is_trusted(now_s):
            return False
        self._left -= 1.0
        self._trusted = self._left >= 1.0
        return True

    def is_trusted(self, now_s: float) -> bool:
        """May batches of the engine be taken now?"""
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
        """A payload that is no batch. One that was set aside, or is replayed, is recorded once."""
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
        """A message that no engine sends: its frames or its seq are wrong."""
        self._counters.poison_frames += 1
        self._record(why, seq, payload)

    def _record(self, why: str, seq: int | None, payload: bytes) -> None:
        self._counters.poison += 1
        self._diagnoses.last_unreadable = why
        if not self._dead_letters.keep(why, seq, payload):
            self._counters.dead_letters_dropped += 1
        place = "" if seq is None else f" {seq}"
        self._log.report("undecodable", f"skipped feed message{place}: {why}")
