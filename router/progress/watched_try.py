"""One request at one engine, while it is watched for progress."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

STREAMED, WHOLE = "streamed", "whole"


def stays(_: frozenset[str]) -> bool:
    """It may not."""
    return False


@dataclass(frozen=True, slots=True)
class SentTry:
    """`kind`: requests whose times to a first byte are alike. `predicted_s`: that time; None: not known. `computes`: an answer
    shows that the engine computes, and not its HTTP server alone. `may_move`: may it be tried on one of these workers
    instead? What that costs is taken from its budget then."""

    worker_id: str
    pool_id: str
    kind: str = STREAMED
    predicted_s: float | None = None
    computes: bool = True
    may_move: Callable[[frozenset[str]], bool] = stays


class _Monitor(Protocol):
    def receive(self, watched: "WatchedTry") -> None: ...

    def close(self, watched: "WatchedTry", *, left: bool) -> None: ...


class WatchedTry:
    """Call `progress` for each part of the answer, and `end` or `leave`."""

    __slots__ = ("_monitor", "_task", "began", "hangs", "sent", "status")

    def __init__(self, monitor: _Monitor, sent: SentTry, task: "asyncio.Task[object] | None") -> None:
        self.sent = sent
        self.began = False
        self.hangs = False
        self.status = 200
        """The answer's status, once it is known."""
        self._monitor = monitor
        self._task = task

    def progress(self, part: bytes) -> None:
        """A part of the answer is there. A refusal and a comment of a stream are computed by nothing but an HTTP server."""
        if self.status < 400 and is_computed(part):
            self.began = True
            self._monitor.receive(self)

    def end(self) -> None:
        """It is over."""
        self._monitor.close(self, left=False)

    def leave(self) -> None:
        """Its client left; not if it was given up here."""
        self._monitor.close(self, left=not self.hangs)

    def give_up(self) -> bool:
        """Cancel what waits for the answer; False if nothing does. `took_cancellation` recognises this cancellation."""
        if self.hangs or self._task is None:
            return False
        self.hangs = True
        self._task.cancel()
        return True

    def took_cancellation(self) -> bool:
        """True if the cancellation just caught was `give_up`; it is over then."""
        if self.hangs and self._task is not None:
            return self._task.uncancel() == 0
        return False


def is_computed(part: bytes) -> bool:
    """False for comments of a stream of events alone, which servers send to keep a connection open."""
    if not part.lstrip().startswith(b":"):
        return bool(part.strip())
    return any(line and not line.startswith(b":") for line in part.splitlines())
