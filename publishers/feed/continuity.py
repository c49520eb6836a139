"""Is what the feed brings the one unbroken story of one engine process? A pure state machine over (seq, payload).

An engine's feed has a seq that starts at 0 in every process and no epoch: another life of the engine is told by its
payloads. So the digests of the last payloads are remembered (bounded), and every replay starts at the oldest of the last
few held and is compared with all of them that it brings.

    in order                             take
    seq held, same payload               a duplicate: ignored
    seq held, another payload            a restart: start over
    seq ahead                            a gap: ask replay, a few times; the same life without a hole: take, else start over
    nothing held yet, seq above 0        a late joiner: ask replay from 0 and take what leads up to it without a hole
    silence, the connection back         ask replay: a lost last batch is otherwise never seen, nor another life whose
                                         next seq happens to follow ours

To start over is to forget all that is held (the caller empties its ledger and begins a new incarnation) and go on from
what is certain: blocks stored before are then not known, and so not announced, which is safe.

The caller does what a Step says, in this order: empty, take, then ask replay and give the answers to `replayed`, before
it offers the next message.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import msgpack
from xxhash import xxh3_128_digest

from kvatlas.errors import InvalidValue

REMEMBERED_PAYLOADS = 16_384
"""More than an engine's replay buffer (10,000 by default): what a replay brought comes again on the feed."""
COMPARED_PAYLOADS = 16
"""A replay starts this far back, at most. One would tell another life that is behind ours; more tell one whose next seq
happened to follow ours, too."""
SAVED_PAYLOADS = 256
REPLAY_TRIES = 3
"""Replays in a row that lack something before what is held is given up."""

MAX_SEQ = (1 << 64) - 2  # the end marker of a replay has all bits set

Batch = tuple[int, bytes]
"""A seq and the payload that came with it."""


@dataclass(frozen=True, slots=True)
class Step:
    """What the caller does now. `why` is one line for the log, empty where nothing is unusual."""

    empty: bool = False
    take: Sequence[Batch] = ()
    ask_from: int | None = None
    why: str = ""


@dataclass(slots=True)
class ContinuityCounters:
    duplicates: int = 0
    restarts: int = 0
    gaps: int = 0
    gaps_filled: int = 0
    started_over: int = 0
    """Times that something held was given up, whatever for."""
    late_joins: int = 0
    replays_failed: int = 0


class Continuity:
    """The position in one engine's feed. `can_replay`: the engine has a replay socket."""

    def __init__(self, *, can_replay: bool = True) -> None:
        self.can_replay = can_replay
        self.counters = ContinuityCounters()
        self.last_seq: int | None = None
        self._digests: dict[int, bytes] = {}  # by seq, in order and without a hole
        self._pending: Batch | None = None
        self._failures = 0

    @property
    def replay_from(self) -> int:
        """The seq that a replay is asked from."""
        if self.last_seq is None:
            return 0
        return self.last_seq + 1 - min(len(self._digests), COMPARED_PAYLOADS)

    @property
    def unproven(self) -> bool:
        """Something is held, and the last replay that was asked whether it still is the engine's did not answer."""
        return self._failures > 0

    @property
    def last_digest(self) -> bytes | None:
        """Digest of the last payload taken."""
        return None if self.last_seq is None else self._digests[self.last_seq]

    # ---------------------------------------------------------------- what came

    def offer(self, seq: int, payload: bytes) -> Step:
        """A message of the feed. Raises InvalidValue for a seq that no message has."""
        if not 0 <= seq <= MAX_SEQ:
            raise InvalidValue(f"feed seq {seq}; expected 0 to {MAX_SEQ}")
        last = self.last_seq
        if last is None:
            if seq == 0 or not self.can_replay:
                return Step(take=self._taken([(seq, payload)]))
            self.counters.late_joins += 1
            self._pending = (seq, payload)
            return Step(ask_from=0, why=f"joined the feed at seq {seq}: asking replay for what was before")
        if seq == last + 1:
            return Step(take=self._taken([(seq, payload)]))
        if seq <= last:
            if self._digests.get(seq) == xxh3_128_digest(payload):
                self.counters.duplicates += 1
                return Step()
            return self._restart((seq, payload), f"feed went back from seq {last} to {seq} with another payload")
        self.counters.gaps += 1
        why = f"feed jumped from seq {last} to {seq}"
        if not self.can_replay:
            return self._start_over([(seq, payload)], why + ", and there is no replay to fill the gap")
        self._pending = (seq, payload)
        return Step(ask_from=self.replay_from, why=why)

    def probe(self) -> Step:
        """The feed has been silent: ask whether a last batch was lost."""
        return Step(ask_from=self.replay_from) if self.can_replay else Step()

    def resume(self) -> Step:
        """At the start, with a loaded state: ask whether the engine still lives the life that was saved."""
        if self.last_seq is None:
            return self.probe()
        if not self.can_replay:
            return self._start_over([], "a saved ledger can't be compared without a replay socket")
        return Step(ask_from=self.replay_from)

    def restarted(self) -> Step:
        """The engine's process is known to be another one. What the caller has queued of the feed may be of either life:
        it drops that first."""
        return self._restart(None, "the engine's process started anew")

    def reconnected(self) -> Step:
        """The connection was lost, and is back: ask what was missed, and whether it is still the same life."""
        if self.can_replay or self.last_seq is None:
            return self.probe()
        return self._start_over([], "the connection was lost, and there is no replay to tell what was missed")

    def replayed(self, answers: Sequence[Batch], complete: bool) -> Step:
        """The answers to the last replay asked, in the order they came. `complete`: its end marker came too.

        One that is complete and has no hole is the engine's own word, later than the message that made us ask: a message that
        it does not have, and that is not older than all it has, is not of this life of the engine.
        """
        pending, self._pending = self._pending, None
        seen = dict(answers)
        whole = complete and (not seen or max(seen) - min(seen) < len(seen))
        last = self.last_seq
        if last is None:
            return self._joined(seen, whole, pending)
        other = next(
            (seq for seq, held in self._digests.items() if seq in seen and xxh3_128_digest(seen[seq]) != held), None
        )
        if other is not None:
            return self._restart(pending, f"replay has another payload for seq {other}: another life of the engine")
        if last not in seen:
            if not whole:
                return self._failed(seen, pending, f"replay did not answer to its end behind seq {last}")
            if pending is None:
                return self._restart(
                    None, f"replay does not know seq {last}: another life of the engine, or one long ahead"
                )
            return self._start_over(_story(seen, whole, pending), f"replay no longer reaches back to seq {last}")
        after: list[Batch] = []
        while (seq := last + 1 + len(after)) in seen:
            after.append((seq, seen[seq]))
        reached = last + len(after)
        if not whole and reached < (max(seen) if pending is None else pending[0]):
            return self._failed(seen, pending, f"replay has a hole, or no end, behind seq {reached}", after)
        self._failures = 0
        why = ""
        if pending is not None:
            if seen.get(pending[0]) == pending[1]:
                self.counters.gaps_filled += 1
            else:
                why = f"replay does not have the message of seq {pending[0]} that came: it is not the engine's"
        return Step(take=self._taken(after), why=why)

    # ---------------------------------------------------------------- what follows

    def _failed(self, seen: Mapping[int, bytes], pending: Batch | None, why: str, after: Sequence[Batch] = ()) -> Step:
        """A replay lacks something: what it brought in order is taken, and it is asked for again, a few times. Without
        `pending` and any answer, at the next probe."""
        failures = self._failures + 1
        self.counters.replays_failed += 1
        if failures >= REPLAY_TRIES:
            return self._start_over(_story(seen, False, pending), f"{why}, {REPLAY_TRIES} times")
        step = Step(take=self._taken(after))
        self._failures, self._pending = failures, pending
        ask_from = self.replay_from if seen or pending is not None else None
        return replace(step, ask_from=ask_from, why=f"{why} ({failures} of {REPLAY_TRIES})")

    def _joined(self, seen: Mapping[int, bytes], whole: bool, pending: Batch | None) -> Step:
        """Nothing is held: take what leads up to the message that came, or to the replay's end."""
        if not whole:
            self.counters.replays_failed += 1
            if (seen or pending is not None) and self._failures + 1 < REPLAY_TRIES:
                self._failures, self._pending = self._failures + 1, pending
                return Step(ask_from=0, why=f"replay did not answer to its end ({self._failures} of {REPLAY_TRIES})")
        self._failures = 0
        batches = _story(seen, whole, pending)
        if not batches:
            return Step()
        first = batches[0][0]
        why = f"taking up the feed at seq {first}: blocks stored before are not known" if first else ""
        return Step(take=self._taken(batches), why=why)

    def _restart(self, pending: Batch | None, why: str) -> Step:
        self.counters.restarts += 1
        if not self.can_replay or (pending is not None and pending[0] == 0):
            return self._start_over([] if pending is None else [pending], why)
        self._forget()
        self._pending = pending
        return Step(empty=True, ask_from=0, why=why)

    def _start_over(self, batches: Sequence[Batch], why: str) -> Step:
        self._forget()
        return Step(empty=True, take=self._taken(batches), why=why)

    def _forget(self) -> None:
        self.counters.started_over += 1
        self.last_seq = None
        self._digests.clear()
        self._pending = None
        self._failures = 0

    def _taken(self, batches: Sequence[Batch]) -> Sequence[Batch]:
        digests = self._digests
        for seq, payload in batches:
            digests[seq] = xxh3_128_digest(payload)
            self.last_seq = seq
            self._failures = 0
            digests.pop(seq - REMEMBERED_PAYLOADS, None)
        return batches

    # ---------------------------------------------------------------- saved with the ledger

    def dump(self) -> bytes:
        """The position and the digests of the last payloads."""
        saved = list(self._digests.items())[-SAVED_PAYLOADS:]
        first = saved[0][0] if saved else 0
        return bytes(msgpack.packb([self.last_seq, first, [digest for _, digest in saved]]))

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
            or any(not isinstance(digest, bytes) for digest in digests)
            or not digests
            or not 0 <= first == last_seq - len(digests) + 1
        ):
            raise InvalidValue(f"saved feed position {last_seq!r:.40} does not fit its digests")
        loaded.last_seq = last_seq
        loaded._digests = {first + i: digest for i, digest in enumerate(digests)}
        return loaded


def _story(seen: Mapping[int, bytes], whole: bool, pending: Batch | None) -> list[Batch]:
    """What to begin with: the longest part without a hole that has `pending` in it and what follows it; with no pending, or
    where it is not the engine's (see `Continuity.replayed`), that ends the answers.

    A batch counts as pending's own past only where the replay knows `pending` itself: else it may be another life's.
    """
    if pending is not None and seen.get(pending[0]) == pending[1]:
        first = last = pending[0]
        while last + 1 in seen:
            last += 1
    elif pending is not None and not (whole and seen and pending[0] >= min(seen)):
        return [pending]
    elif seen:
        first = last = max(seen)
    else:
        return []
    while first - 1 in seen:
        first -= 1
    return [(seq, seen[seq]) for seq in range(first, last + 1)]
