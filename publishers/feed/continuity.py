"""Detects gaps and restarts in one engine's feed: a pure state machine over (seq, payload).

An engine's seq starts at 0 in every process, and messages carry no process id, so only payloads identify the process. We
remember the digests of the last payloads (bounded). Every replay starts a few batches back, and its payloads are compared with
the remembered ones.

    next in order                        take
    seq remembered, same payload         a duplicate: ignore
    seq remembered, another payload      a restart: start over
    seq ahead                            a gap: request replay, a few times; if it fills the gap from the same process, take;
                                         else start over
    nothing taken yet, seq above 0       a late joiner: request replay from 0 and take what leads up to it without a gap
    silence, or reconnected              request replay: this reveals a lost last batch, and another process whose next seq
                                         happens to follow ours

To start over, the caller drops all known blocks (it empties its ledger and begins a new incarnation) and continues from the
batches that are certain. Blocks stored earlier are then unknown and not published, which is safe.

The caller does what a Step says, in this order: empty, take, then request replay and pass its answer to `take_replay`. Only
then does it offer the next message.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import msgpack
from xxhash import xxh3_128_digest

from kvatlas.errors import InvalidValue
from kvatlas_publishers.feed.payload_digests import DIGEST_BYTES, PayloadDigests

REMEMBERED_PAYLOADS = 16_384
"""More than an engine's replay buffer holds (10,000 by default), because the feed repeats batches that a replay has
returned."""
COMPARED_PAYLOADS = 16
"""A replay starts at most this far back. One payload would reveal another process whose seq is behind ours. Several payloads
also reveal a process whose next seq happens to follow ours."""
SAVED_PAYLOADS = 256
REPLAY_TRIES = 3
"""Number of consecutive incomplete replays before all known blocks are dropped."""

MAX_SEQ = (1 << 64) - 2  # the end marker of a replay has all bits set

Batch = tuple[int, bytes]
"""A seq and its payload."""


@dataclass(slots=True)  # not frozen, which would triple the time to create one for each message
class Step:
    """The caller's next actions. `why` is a line for the log, empty if nothing is unusual."""

    empty: bool = False
    take: Sequence[Batch] = ()
    ask_from: int | None = None
    why: str = ""

    @property
    def is_next_batch(self) -> bool:
        """True if all that is left to do is to take the offered batch."""
        return len(self.take) == 1 and self.ask_from is None and not self.empty and not self.why


@dataclass(slots=True)
class ContinuityCounters:
    duplicates: int = 0
    restarts: int = 0
    gaps: int = 0
    gaps_filled: int = 0
    started_over: int = 0
    """Number of times that all known blocks were dropped, for any reason."""
    late_joins: int = 0
    replays_failed: int = 0


class Continuity:
    """The position in one engine's feed. `can_replay`: the engine has a replay socket."""

    def __init__(self, *, can_replay: bool = True, max_seq: int = MAX_SEQ) -> None:
        self.can_replay = can_replay
        self._max_seq = max_seq
        self.counters = ContinuityCounters()
        self.last_seq: int | None = None
        self._digests = PayloadDigests(REMEMBERED_PAYLOADS)
        self._pending: Batch | None = None
        self._failures = 0

    @property
    def replay_from(self) -> int:
        """The first seq to request from replay."""
        if self.last_seq is None:
            return 0
        return self.last_seq + 1 - min(len(self._digests), COMPARED_PAYLOADS)

    @property
    def unproven(self) -> bool:
        """True if something is held but the last replay, which should have confirmed it, was incomplete."""
        return self._failures > 0

    # ---------------------------------------------------------------- what came

    def offer(self, seq: int, payload: bytes) -> Step:
        """Take a message from the feed. Raises InvalidValue for an impossible seq."""
        if not 0 <= seq <= self._max_seq:
            raise InvalidValue(f"feed seq {seq}; expected 0 to {self._max_seq}")
        last = self.last_seq
        if last is None:
            if seq == 0 or not self.can_replay:
                return Step(take=self._record_taken([(seq, payload)]))
            self.counters.late_joins += 1
            self._pending = (seq, payload)
            return Step(ask_from=0, why=f"joined the feed at seq {seq}; asking replay for earlier batches")
        if seq == last + 1:
            return Step(take=self._record_taken([(seq, payload)]))
        if seq <= last:
            if self._digests.get(seq) == xxh3_128_digest(payload):
                self.counters.duplicates += 1
                return Step()
            return self._restart((seq, payload), f"engine restarted: feed went back from seq {last} to {seq}")
        self.counters.gaps += 1
        why = f"gap in the feed: seq {last} is followed by {seq}"
        if not self.can_replay:
            return self._start_over([(seq, payload)], f"{why}, and no replay socket is set")
        self._pending = (seq, payload)
        return Step(ask_from=self.replay_from, why=f"{why}; asking replay")

    def probe(self) -> Step:
        """Probe a silent feed, in case its last batch was lost."""
        return Step(ask_from=self.replay_from) if self.can_replay else Step()

    def resume(self) -> Step:
        """Call at the start, with a loaded state: check whether the engine's process is still the saved one."""
        if self.last_seq is None:
            return self.probe()
        if not self.can_replay:
            return self._start_over([], "saved state can't be verified without a replay socket")
        return Step(ask_from=self.replay_from)

    def restart(self) -> Step:
        """Start over: the engine's process was replaced. The caller first drops its queued messages, which may come from
        either process."""
        return self._restart(None, "engine restarted: its process start time changed")

    def reconnect(self) -> Step:
        """Call after the connection is back: check what was missed, and whether the engine's process is still the same."""
        if self.can_replay or self.last_seq is None:
            return self.probe()
        return self._start_over([], "connection was lost, and no replay socket is set to ask what was missed")

    def take_replay(self, batches: Sequence[Batch], complete: bool) -> Step:
        """Take the batches of the last replay, in the order received. `complete`: True if its end marker arrived too.

        A complete replay without a gap is the engine's own record, and newer than the message that made us ask. If that
        message is missing from it, although it is not older than the whole replay, then another process sent it.
        """
        pending, self._pending = self._pending, None
        by_seq = dict(batches)
        whole = complete and (not by_seq or max(by_seq) - min(by_seq) < len(by_seq))
        last = self.last_seq
        if last is None:
            return self._join(by_seq, whole, pending)
        other = next((seq for seq in sorted(by_seq) if self._is_other(seq, by_seq[seq])), None)
        if other is not None:
            return self._restart(pending, f"engine restarted: replay has another payload for seq {other}")
        if last not in by_seq:
            if not whole:
                return self._retry(by_seq, pending, f"replay was incomplete after seq {last}")
            if pending is None:
                return self._restart(None, f"engine restarted, or is far ahead: replay does not have seq {last}")
            return self._start_over(
                _first_batches(by_seq, whole, pending), f"replay no longer reaches back to seq {last}"
            )
        after: list[Batch] = []
        while (seq := last + 1 + len(after)) in by_seq:
            after.append((seq, by_seq[seq]))
        reached = last + len(after)
        must_reach = max(by_seq) if pending is None else pending[0]
        if not whole and reached < must_reach:
            return self._retry(by_seq, pending, f"replay has a gap, or no end, after seq {reached}", after)
        self._failures = 0
        why = ""
        if pending is not None:
            seq, payload = pending
            if by_seq.get(seq) == payload:
                self.counters.gaps_filled += 1
            else:
                why = f"feed message {seq} ignored: replay does not have it, so it is not the engine's"
        return Step(take=self._record_taken(after), why=why)

    def _is_other(self, seq: int, payload: bytes) -> bool:
        """True if a different payload was taken under this seq."""
        known = self._digests.get(seq)
        return known is not None and known != xxh3_128_digest(payload)

    # ---------------------------------------------------------------- what follows

    def _retry(self, by_seq: Mapping[int, bytes], pending: Batch | None, why: str, after: Sequence[Batch] = ()) -> Step:
        """Handle an incomplete replay: take what it returned in order, and ask again, a few times. If it was empty and no
        message is pending, ask at the next probe."""
        failures = self._failures + 1
        self.counters.replays_failed += 1
        if failures >= REPLAY_TRIES:
            return self._start_over(_first_batches(by_seq, False, pending), f"{why}, {REPLAY_TRIES} times in a row")
        step = Step(take=self._record_taken(after))
        self._failures, self._pending = failures, pending
        ask_from = self.replay_from if by_seq or pending is not None else None
        return replace(step, ask_from=ask_from, why=f"{why} (try {failures} of {REPLAY_TRIES})")

    def _join(self, by_seq: Mapping[int, bytes], whole: bool, pending: Batch | None) -> Step:
        """Because nothing is held, start with the batches that lead up to the pending message or to the replay's end."""
        if not whole:
            self.counters.replays_failed += 1
            if (by_seq or pending is not None) and self._failures + 1 < REPLAY_TRIES:
                self._failures, self._pending = self._failures + 1, pending
                return Step(ask_from=0, why=f"replay was incomplete (try {self._failures} of {REPLAY_TRIES})")
        self._failures = 0
        batches = _first_batches(by_seq, whole, pending)
        if not batches:
            return Step()
        first, _ = batches[0]
        why = f"following the feed from seq {first}; blocks stored earlier are unknown" if first else ""
        return Step(take=self._record_taken(batches), why=why)

    def _restart(self, pending: Batch | None, why: str) -> Step:
        self.counters.restarts += 1
        if not self.can_replay or (pending is not None and pending[0] == 0):
            return self._start_over([] if pending is None else [pending], why)
        self._drop()
        self._pending = pending
        return Step(empty=True, ask_from=0, why=why)

    def _start_over(self, batches: Sequence[Batch], why: str) -> Step:
        self._drop()
        return Step(empty=True, take=self._record_taken(batches), why=why)

    def _drop(self) -> None:
        self.counters.started_over += 1
        self.forget()

    def forget(self) -> None:
        """Reset to the start of an unknown feed."""
        self.last_seq = None
        self._digests.clear()
        self._pending = None
        self._failures = 0

    def _record_taken(self, batches: Sequence[Batch]) -> Sequence[Batch]:
        for seq, payload in batches:
            self._digests.add(seq, payload)
            self.last_seq = seq
            self._failures = 0
        return batches

    # ---------------------------------------------------------------- saved with the ledger

    def dump(self) -> bytes:
        """The position and the digests of the last payloads."""
        return bytes(msgpack.packb([self.last_seq, *self._digests.last(SAVED_PAYLOADS)]))

    @classmethod
    def load(cls, dumped: bytes, *, can_replay: bool = True) -> "Continuity":
        """The inverse of `dump`. Raises InvalidValue for other bytes."""
        try:
            last_seq, first, digests = msgpack.unpackb(dumped)
        except (ValueError, TypeError, msgpack.UnpackException) as error:
            raise InvalidValue(f"not a saved feed position: {error}") from error
        loaded = cls(can_replay=can_replay)
        if last_seq is None and digests == []:
            return loaded
        if (
            type(last_seq) is not int
            or type(first) is not int
            or not isinstance(digests, list)
            or any(not isinstance(digest, bytes) or len(digest) != DIGEST_BYTES for digest in digests)
            or not digests
            or not 0 <= first == last_seq - len(digests) + 1
        ):
            raise InvalidValue(f"saved feed position {last_seq!r:.40} does not fit its digests")
        loaded.last_seq = last_seq
        loaded._digests = PayloadDigests(REMEMBERED_PAYLOADS, first, digests)
        return loaded


def _first_batches(by_seq: Mapping[int, bytes], whole: bool, pending: Batch | None) -> list[Batch]:
    """The batches to start with: the longest part without a gap that contains `pending`. Without `pending`, or if another
    process sent it (see `Continuity.take_replay`), they are the longest part at the replay's end.

    Earlier batches belong to the process of `pending` only if the replay contains `pending` itself.
    """
    if pending is not None and by_seq.get(pending[0]) == pending[1]:
        first = last = pending[0]
        while last + 1 in by_seq:
            last += 1
    elif pending is not None and not (whole and by_seq and pending[0] >= min(by_seq)):
        return [pending]
    elif by_seq:
        first = last = max(by_seq)
    else:
        return []
    while first - 1 in by_seq:
        first -= 1
    return [(seq, by_seq[seq]) for seq in range(first, last + 1)]
