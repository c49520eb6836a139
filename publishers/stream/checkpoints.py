"""Decides when a checkpoint is due (pure; times are seconds of one clock)."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CheckpointSettings:
    """A checkpoint is due after this many messages or seconds with changes, and when a worker that has changed becomes
    idle."""

    every_messages: int = 1000
    every_s: float = 30.0
    idle_s: float = 2.0


class CheckpointClock:
    """Counts messages since the last checkpoint or snapshot. If there are none, no checkpoint is due."""

    def __init__(self, settings: CheckpointSettings) -> None:
        self._settings = settings
        self._messages = 0
        self._first_s = 0.0
        self._last_s = 0.0

    def record_messages(self, messages: int, now_s: float) -> None:
        """Count messages with changes that were put in the outbox."""
        if not self._messages:
            self._first_s = now_s
        self._messages += messages
        self._last_s = now_s

    def reset(self) -> None:
        """Reset: a checkpoint or a snapshot covers all messages so far."""
        self._messages = 0

    def due_in(self, now_s: float) -> float | None:
        """Seconds until a checkpoint is due; 0 if it is due; None if nothing has changed since the last one."""
        if not self._messages:
            return None
        if self._messages >= self._settings.every_messages:
            return 0.0
        at_s = min(self._first_s + self._settings.every_s, self._last_s + self._settings.idle_s)
        return max(0.0, at_s - now_s)
