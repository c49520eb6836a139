"""A request's own hints for its choice, as headers. They are read only if switched on, because a client that sets them
decides where its requests go."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Self

from kvatlas.errors import InvalidValue
from router_client.decision.selector import Selector
from router_client.prompt import Prompt, Strategy

HINT_HEADERS = tuple(
    f"x-kvatlas-{hint}".encode() for hint in ("strategy", "priority", "session", "allow", "deny", "wait-ms")
)
MOST_LETTERS = 8_192
MOST_PRIORITY = 1 << 31

_STRATEGY, _PRIORITY, _SESSION, _ALLOW, _DENY, _WAIT_MS = HINT_HEADERS


@dataclass(frozen=True, slots=True)
class RequestHintHeaders:
    """`strategy=None`: the router's own strategy. `priority`: lower values come first; None: no hint. `allow=None`: all
    workers are allowed. `wait_s`: the longest wait for a worker with room; None: the router's settings decide."""

    strategy: Strategy | None = None
    priority: int | None = None
    session_id: str | None = None
    allow: tuple[str, ...] | None = None
    deny: tuple[str, ...] = ()
    wait_s: float | None = None

    @classmethod
    def read(cls, headers: Iterable[tuple[bytes, bytes]]) -> Self:
        """Read the hints. Raises InvalidValue, with a one-line message that names the header."""
        found = {name: value.decode("latin-1").strip() for name, value in headers if name in HINT_HEADERS}
        for name, value in found.items():
            if len(value) > MOST_LETTERS:
                raise InvalidValue(f"header {name.decode()} has {len(value)} characters; expected up to {MOST_LETTERS}")
        return cls(
            _strategy(found.get(_STRATEGY, "")),
            _priority(found.get(_PRIORITY, "")),
            found.get(_SESSION) or None,
            _ids(found.get(_ALLOW, "")) or None,
            _ids(found.get(_DENY, "")),
            _wait_s(found.get(_WAIT_MS, "")),
        )

    def apply(self, prompt: Prompt) -> Prompt:
        """The prompt with these hints applied."""
        select = prompt.select
        if self.allow is not None or self.deny:
            select = replace(select or Selector(), allow=self.allow, deny=self.deny)
        session_id = self.session_id or prompt.session_id
        return replace(prompt, strategy=self.strategy, session_id=session_id, select=select, wait_s=self.wait_s)


def _strategy(value: str) -> Strategy | None:
    if not value:
        return None
    try:
        return Strategy(value.lower().replace("-", "_"))
    except ValueError:
        known = ", ".join(Strategy)
        raise InvalidValue(f"header {_STRATEGY.decode()} is {value!r:.80}; expected one of {known}") from None


def _priority(value: str) -> int | None:
    if not value:
        return None
    try:
        priority = int(value[:32])
    except ValueError:
        priority = MOST_PRIORITY + 1
    if abs(priority) > MOST_PRIORITY:
        raise InvalidValue(f"header {_PRIORITY.decode()} is {value!r:.80}; expected a whole number, lower is earlier")
    return priority


def _wait_s(value: str) -> float | None:
    if not value:
        return None
    if not (value.isascii() and value.isdigit() and len(value) <= 9 and int(value)):
        raise InvalidValue(f"header {_WAIT_MS.decode()} is {value!r:.80}; expected whole milliseconds, at least 1")
    return int(value) / 1_000


def _ids(value: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in value.split(",") if part.strip())
