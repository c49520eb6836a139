"""Reads a stream of server-sent events while it passes: its usage, which is hidden if the client did not ask for it, and how
many events have a part of the answer."""

import json
import re
from collections.abc import Iterator
from typing import Any

from router_client.learning.usage import Usage

MOST_BYTES = 4 << 20
"""A longer event is passed on as it comes and not read."""

_CONTENT = re.compile(
    rb'"(?:content|reasoning_content|reasoning|text|refusal|arguments|delta|thinking|partial_json)"\s*:\s*"(?!")'
    rb'|"(?:tool_calls|token_ids)"\s*:\s*\[\s*[^\]\s]'
)
"""In an event of vLLM 0.33 or SGLang 0.5 that brings tokens. A JSON decoder would take longer, for each token of each
answer."""

_NULL = (b'"usage":null', b'"usage": null')


class EventStream:
    """Bytes in, whole events out: should the engine go away, an error event can follow. `usage` is the last one seen; `parts`:
    how many events had a part of the answer, not only a role, a finish reason or a usage; `done`: the event that ends it came.

    `hide_usage`: leave out the event that has a usage and no choice.
    """

    def __init__(self, *, hide_usage: bool) -> None:
        self.usage: Usage | None = None
        self.parts = 0
        self.done = False
        self._hide = hide_usage
        self._rest = b""

    def feed(self, chunk: bytes) -> bytes:
        """The bytes for the client now; may be empty."""
        whole = self._rest + chunk if self._rest else chunk
        passed: list[bytes] = []
        at = 0
        while (end := _end_of_event(whole, at)) >= 0:
            event = whole[at:end]
            if not self._read(event):
                passed.append(event)
            at = end
        self._rest = whole[at:]
        if len(self._rest) > MOST_BYTES:
            passed.append(self._rest)
            self._rest = b""
        return b"".join(passed)

    def end(self) -> bytes:
        """The rest at the end of the stream: an event without its empty line."""
        rest, self._rest = self._rest, b""
        return b"" if rest and self._read(rest) else rest

    def _read(self, event: bytes) -> bool:
        """True for an event to leave out."""
        self.parts += _CONTENT.search(event) is not None
        self.done = self.done or event.startswith(b"data: [DONE]")
        if b'"usage"' not in event or any(null in event for null in _NULL):
            return False
        for answer in _data(event):
            if (usage := Usage.of(answer)) is not None:
                self.usage = usage
                return self._hide and not answer.get("choices")
        return False


def _end_of_event(text: bytes, start: int) -> int:
    """The position behind the empty line that ends the event beginning at `start`; -1 if that line is not there yet."""
    ends = [at + len(mark) for mark in (b"\n\n", b"\r\n\r\n") if (at := text.find(mark, start)) >= 0]
    return min(ends, default=-1)


def _data(event: bytes) -> Iterator[Any]:
    for line in event.splitlines():
        if line.startswith(b"data:"):
            try:
                yield json.loads(line[5:])
            except ValueError:  # for the client to judge: it passes unchanged
                continue
