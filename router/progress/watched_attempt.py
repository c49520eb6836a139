"""One request to one engine, watched for progress."""

import asyncio
from collections.abc import Callable
from typing import Protocol

from kvatlas.dataclass import dataclass

STREAMED, WHOLE = "streamed", "whole"


def stays(_: frozenset[str], began: bool) -> bool:
    """The `may_move` of requests that must not move."""
    return False


@dataclass(frozen=True, slots=True)
class SentAttempt:
    """An attempt, as sent. `kind`: groups requests with similar times to the first byte. `predicted_s`: that time; None:
    unknown. `computes`: an answer proves that the engine itself computes, not just its HTTP server. `may_move(workers,
    begun)`: true if the request may be tried on one of these workers instead; the budget is then charged. `begun`: the
    request's answer has begun."""

    worker_id: str
    pool_id: str
    kind: str = STREAMED
    predicted_s: float | None = None
    computes: bool = True
    may_move: Callable[[frozenset[str], bool], bool] = stays


class _Monitor(Protocol):
    def receive(self, watched: "WatchedAttempt") -> None: ...

    def close(self, watched: "WatchedAttempt", *, left: bool) -> None: ...

    def count_move(self) -> None: ...


class WatchedAttempt:
    """Call `progress` for each part of the answer, and `end` or `leave`.

    `reading`: it is waiting for the engine, not for its client; only then can an answer that has begun be abandoned.
    `hangs`: it was abandoned. `is_lost`: it was abandoned for good."""

    __slots__ = ("_cancelled", "_monitor", "_task", "began", "hangs", "is_lost", "reading", "sent", "status")

    def __init__(self, monitor: _Monitor, sent: SentAttempt, task: "asyncio.Task[object] | None") -> None:
        self.sent = sent
        self.began = False
        self.hangs = self.is_lost = False
        self.reading = True
        self.status = 200
        """The answer's status, once it is known."""
        self._monitor = monitor
        self._task = task
        self._cancelled = False

    def progress(self, part: bytes) -> None:
        """Record a part of the answer. Refusals and a stream's comments don't count, since an HTTP server can produce
        them on its own."""
        if self.status < 400 and is_computed(part):
            self.began = True
            self._monitor.receive(self)

    def end(self) -> None:
        """Stop watching: the request is over."""
        self._monitor.close(self, left=False)

    def leave(self) -> None:
        """Record that the request's client disconnected, unless `give_up` cancelled it."""
        self._monitor.close(self, left=not self.hangs)

    def give_up(self, *, lost: bool = False) -> bool:
        """Cancel the task that waits for the answer; `took_cancellation` recognizes this. Returns False, and does nothing, if
        there is no such task, if it was already cancelled for this, or if the answer has begun and is waiting for its client.
        `lost`: the answer will never come."""
        if self.hangs or self._task is None or (self.began and not self.reading):
            return False
        self.hangs = self._cancelled = True
        self.is_lost = lost
        self._task.cancel()
        return True

    def took_cancellation(self) -> bool:
        """True if the cancellation just caught came from `give_up`; it then counts as handled."""
        if not self._cancelled or self._task is None:
            return False
        self._cancelled = False
        return self._task.uncancel() == 0

    def stay(self) -> None:
        """Keep waiting for an answer that was abandoned."""
        self.hangs = False

    def move(self) -> None:
        """Stop watching an answer that was abandoned here and continues elsewhere."""
        self._monitor.count_move()
        self.end()


_MAY_BE_A_COMMENT = b": \t\n\r\x0b\x0c"


def is_computed(part: bytes) -> bool:
    """False if the part has only event-stream comments, which servers send to keep a connection open."""
    if part[:1] not in _MAY_BE_A_COMMENT:
        return True
    if not part.lstrip().startswith(b":"):
        return bool(part.strip())
    return any(line and not line.startswith(b":") for line in part.splitlines())
