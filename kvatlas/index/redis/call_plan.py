"""Cuts the messages for `apply` into calls that occupy the store for a few milliseconds each, whatever their size.

A call carries whole messages, or a part of one that is too large for a call. Parts are counted in **steps**: each hash of an
event is one step, and so is an event without hashes. The call that applies steps also records in the store how many steps of a
worker's next message have been applied. Each step is therefore applied once, even if another process continues after a crash
and cuts elsewhere.

Limiting messages to 256 hashes, so that none has to be cut, would take a fifth more CPU time per block: 3.0 us instead of 2.5
us with 4,096 hashes (`benchmarks.stream.message_sizes`). Besides, a message of version 1 may have 65,000 hashes.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from kvatlas.blocks.hashing import HASH_BYTES
from kvatlas.bus.partition_batch import PartitionBatch
from kvatlas.bus.wire import (
    CHUNK,
    CODE,
    EVENTS,
    HASHES,
    HEAD_BITS,
    HEADS,
    MARK_HASHES,
    MARKED,
    PARENT,
    REMOVED,
    SCOPE_ID,
    STORED,
    UNMARKED,
    WORKER_ID,
    RawMessage,
)

CALL_COST = 450
"""Maximum cost of a call, counted in changes of one block with a short value. Each change takes the store one or two
microseconds, or up to eight while a large hash grows on a busy machine."""
WORKER_COST, SCOPE_COST, EVENT_COST = 12, 10, 4
SWITCH_COST = 20
"""The cost of an event without hashes, in which a holder begins or ends, or a digest is compared."""
WHOLE_STEPS = 64
"""A message of up to this many steps is never cut."""

MARK_COSTS = {MARKED: 4, UNMARKED: 4, HEADS: 6}
"""The cost per hash of an event about marks, because each value has to be taken apart."""

WITH_HASHES = frozenset((STORED, REMOVED, CHUNK))
HASHES_AT = {**dict.fromkeys(WITH_HASHES, HASHES), **dict.fromkeys(MARK_COSTS, MARK_HASHES)}
"""The index of an event's hashes, by event code; these events name a scope."""


class Part(NamedTuple):
    """Part of a message: the `events` from step `first_step` on, and the step after each. `last`: the message ends with them.

    A chunk that continues in the next part becomes a stored event here, so that the store counts each chunk only once.
    """

    first_step: int
    last: bool
    ends: list[int]
    events: list[list[Any]]


class CallMessage(NamedTuple):
    """One message of a call, either whole or a part of it."""

    raw: RawMessage
    part: Part | None

    @property
    def events(self) -> list[list[Any]]:
        events: list[list[Any]] = self.raw[EVENTS] if self.part is None else self.part.events
        return events


class CallBatch(NamedTuple):
    """One partition's messages in a call. `complete`: after the call, all messages of the batch are applied."""

    batch: PartitionBatch
    messages: list[CallMessage]
    complete: bool


class Place(NamedTuple):
    """How far a plan has got: the next batch, the message in that batch, and the step in that message."""

    batch: int = 0
    message: int = 0
    step: int = 0


class _Budget:
    """The capacity that is left in a call."""

    def __init__(self, weights: Mapping[bytes, float]) -> None:
        self.room = float(CALL_COST)
        self._weights = weights
        self._workers: set[str] = set()
        self._scopes: set[tuple[str, bytes]] = set()

    def _weight(self, event: list[Any]) -> float:
        """The cost of one hash of an event."""
        return MARK_COSTS.get(event[CODE]) or self._weights.get(event[SCOPE_ID], 1.0)

    def measure(self, raw: RawMessage) -> tuple[float, int]:
        """The cost of a whole message, and the number of its steps."""
        worker_id = raw[WORKER_ID]
        priced: set[bytes] = set()
        cost, steps = 0.0 if worker_id in self._workers else WORKER_COST, 0
        for event in raw[EVENTS]:
            if event[CODE] not in HASHES_AT:
                cost += SWITCH_COST
                steps += 1
                continue
            scope_id, blocks = event[SCOPE_ID], _hashes(event)
            if scope_id not in priced and (worker_id, scope_id) not in self._scopes:
                priced.add(scope_id)
                cost += SCOPE_COST
            cost += EVENT_COST + blocks * self._weight(event)
            steps += blocks
        return cost, steps

    def take(self, raw: RawMessage, cost: float) -> CallMessage:
        """Add a whole message."""
        self.room -= cost
        self._workers.add(raw[WORKER_ID])
        self._scopes.update((raw[WORKER_ID], event[SCOPE_ID]) for event in raw[EVENTS] if event[CODE] in HASHES_AT)
        return CallMessage(raw, None)

    def cut(self, raw: RawMessage, first_step: int) -> tuple[CallMessage, int]:
        """Add as much of a message as fits, from this step on, but at least one step. Also returns the step after that."""
        ends: list[int] = []
        events: list[list[Any]] = []
        scopes: set[bytes] = set()
        last, step = True, 0
        self.room -= WORKER_COST
        for event in raw[EVENTS]:
            before, code = step, event[CODE]
            begin = max(first_step - before, 0)
            steps = 1
            if code in HASHES_AT:
                scope_id, steps = event[SCOPE_ID], _hashes(event)
            step = before + steps
            if begin >= steps:
                continue
            if code not in HASHES_AT:
                self.room -= SWITCH_COST
                fits = int(self.room >= 0)
            else:
                self.room -= EVENT_COST if scope_id in scopes else EVENT_COST + SCOPE_COST
                scopes.add(scope_id)
                weight = self._weight(event)
                fits = min(int(max(self.room, 0.0) / weight), steps - begin)
                self.room -= fits * weight
            fits = fits if ends else max(fits, 1)
            if fits:
                step = before + begin + fits
                events.append(event if fits == steps else _piece(event, begin, begin + fits))
                ends.append(step)
            last = begin + fits == steps
            if not last:
                step = before + begin + fits
                break
        return CallMessage(raw, Part(first_step, last, ends, events)), step


def cut_call(
    batches: Sequence[PartitionBatch], start: Place, weights: Mapping[bytes, float]
) -> tuple[list[CallBatch], Place | None]:
    """The next call, and where the call after it starts (None: everything is in calls).

    `weights`: the cost of a block by scope, relative to a block with a short value; 1 for scopes that are not listed.
    """
    call: list[CallBatch] = []
    budget = _Budget(weights)
    for number in range(start.batch, len(batches)):
        batch = batches[number]
        messages: list[CallMessage] = []
        first, first_step = (start.message, start.step) if number == start.batch else (0, 0)
        for at in range(first, len(batch.messages)):
            raw = batch.messages[at]
            step = first_step if at == first else 0
            if not step:
                cost, steps = budget.measure(raw)
                if cost > budget.room and (call or messages):
                    return [*call, CallBatch(batch, messages, False)], Place(number, at)
                if steps <= WHOLE_STEPS:
                    messages.append(budget.take(raw, cost))
                    continue
            message, next_step = budget.cut(raw, step)
            messages.append(message)
            if message.part is not None and not message.part.last:
                return [*call, CallBatch(batch, messages, False)], Place(number, at, next_step)
        call.append(CallBatch(batch, messages, True))
    return call, None


def _hashes(event: list[Any]) -> int:
    """The number of hashes in an event."""
    return len(event[HASHES_AT[event[CODE]]]) // HASH_BYTES


def _piece(event: list[Any], begin: int, end: int) -> list[Any]:
    """The event, with only some of its hashes."""
    code, at, piece = event[CODE], HASHES_AT[event[CODE]], [*event]
    piece[at] = event[at][begin * HASH_BYTES : end * HASH_BYTES]
    if code == HEADS:
        piece[HEAD_BITS] = event[HEAD_BITS][begin * HASH_BYTES : end * HASH_BYTES]
    elif code in (STORED, CHUNK):
        if begin:
            piece[PARENT] = event[HASHES][(begin - 1) * HASH_BYTES : begin * HASH_BYTES]
        if code == CHUNK and end * HASH_BYTES < len(event[HASHES]):
            piece[CODE] = STORED
    return piece
