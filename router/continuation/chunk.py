"""One event of OpenAI's chat and completions streams, as far as a continuation needs it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvatlas.runtime.json_text import decode
from kvatlas_router.continuation.reasons import Why

_SILENT = frozenset({"role", "content"})
_REASONING = frozenset({"reasoning", "reasoning_content"})


@dataclass(frozen=True, slots=True)
class Chunk:
    """`text`: its part of the answer. `ids`: the part's token ids, if the engine gives them. `opens`: only a role. `finish`:
    the finish reason; `stop`: the stop string. `has_choice`: false for a usage. `is_plain`: nothing in it belongs to single
    tokens. `other`: why an answer with this event can't go on."""

    text: str = ""
    ids: Sequence[int] | None = None
    opens: bool = False
    finish: str | None = None
    stop: str | None = None
    usage: Mapping[str, Any] | None = None
    has_choice: bool = True
    is_plain: bool = True
    other: Why | None = None


def read_chunk(data: bytes) -> Chunk:
    """Read an event's data."""
    try:
        decoded = decode(data)
    except (ValueError, RecursionError):
        return Chunk(other=Why.UNREADABLE)
    if not isinstance(decoded, dict) or not isinstance(choices := decoded.get("choices"), list):
        return Chunk(other=Why.UNREADABLE)
    usage = decoded.get("usage")
    usage = usage if isinstance(usage, dict) else None
    if not choices:
        return Chunk(usage=usage, has_choice=False)
    choice = choices[0]
    if len(choices) > 1 or not isinstance(choice, dict) or choice.get("index") not in (0, None):
        return Chunk(usage=usage, other=Why.CHOICES)
    delta = choice.get("delta")
    said = delta if isinstance(delta, dict) else {}
    text = said.get("content") if "delta" in choice else choice.get("text")
    others = {name for name, value in said.items() if value and name not in _SILENT}
    finish, ids = choice.get("finish_reason"), choice.get("token_ids")
    return Chunk(
        text=text if isinstance(text, str) else "",
        ids=ids if isinstance(ids, list) else None,
        opens=bool(said.get("role")) and not text and not others and finish is None,
        finish=finish if isinstance(finish, str) else None,
        stop=stop if isinstance(stop := choice.get("stop_reason", choice.get("matched_stop")), str) else None,
        usage=usage,
        is_plain=choice.get("logprobs") is None,
        other=_why(others),
    )


def _why(others: set[str]) -> Why | None:
    if not others:
        return None
    if others & _REASONING:
        return Why.REASONING
    return Why.TOOL_CALL if others & {"tool_calls", "function_call"} else Why.UNREADABLE
