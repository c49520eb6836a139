"""The parts of one event that a continuation needs, from OpenAI's streams of chats and completions or from vLLM's streams of
token ids."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvatlas.runtime.json_text import decode
from kvatlas_router.continuation.reasons import Why

_SILENT = frozenset({"role", "content"})
_REASONING = ("reasoning", "reasoning_content")


@dataclass(frozen=True, slots=True)
class Chunk:
    """One event.

    `text`, `reasoning`: the event's parts of the content and of the reasoning; `thinks_in`: the fields that hold the
    reasoning. `ids`: the token ids of these parts, if the engine sends them; `prompt_ids`: those of the prompt. `calls`: the
    event's parts of tool calls. `opens`: the event has only a role. `says`: it has more than token ids. `finish`: the finish
    reason; `stop`: the stop string. `has_choice`: False for an event with only a usage. `is_plain`: it has nothing about
    single tokens, such as logprobs. `other`: why an answer with this event can't be continued.
    """

    text: str = ""
    reasoning: str = ""
    thinks_in: tuple[str, ...] = ()
    ids: Sequence[int] | None = None
    prompt_ids: Sequence[int] | None = None
    calls: Sequence[Mapping[str, Any]] = ()
    opens: bool = False
    says: bool = True
    finish: str | None = None
    stop: str | None = None
    usage: Mapping[str, Any] | None = None
    has_choice: bool = True
    is_plain: bool = True
    other: Why | None = None


def read_chunk(data: bytes, index: int = 0) -> Chunk:
    """Read the data of an event that belongs to the choice with this index."""
    try:
        decoded = decode(data)
    except ValueError:
        return Chunk(other=Why.UNREADABLE)
    if not isinstance(decoded, dict) or not isinstance(choices := decoded.get("choices"), list):
        return Chunk(other=Why.UNREADABLE)
    usage = decoded.get("usage")
    usage = usage if isinstance(usage, dict) else None
    if not choices:
        return Chunk(usage=usage, has_choice=False)
    choice = choices[0]
    if len(choices) > 1 or not isinstance(choice, dict) or choice.get("index") not in (index, None):
        return Chunk(usage=usage, other=Why.CHOICES)
    delta = choice.get("delta")
    said = delta if isinstance(delta, dict) else {}
    text = said.get("content") if "delta" in choice else choice.get("text")
    thinks_in = tuple(name for name in _REASONING if isinstance(said.get(name), str) and said[name])
    others = {name for name, value in said.items() if value and name not in _SILENT and name not in thinks_in}
    finish, ids = choice.get("finish_reason"), choice.get("token_ids")
    if isinstance(ids, list) and "output_mode" in decoded and "text" not in choice:
        text = text_of_ids(ids)
    prompt_ids, calls = decoded.get("prompt_token_ids"), said.get("tool_calls")
    return Chunk(
        text=text if isinstance(text, str) else "",
        reasoning=said[thinks_in[0]] if thinks_in else "",
        thinks_in=thinks_in,
        ids=ids if isinstance(ids, list) else None,
        prompt_ids=prompt_ids if isinstance(prompt_ids, list) else None,
        calls=[call for call in calls if isinstance(call, dict)] if isinstance(calls, list) else (),
        says=bool(said) or "delta" not in choice or finish is not None,
        opens=bool(said.get("role")) and not (text or others or thinks_in) and finish is None,
        finish=finish if isinstance(finish, str) else None,
        stop=stop if isinstance(stop := choice.get("stop_reason", choice.get("matched_stop")), str) else None,
        usage=usage,
        is_plain=choice.get("logprobs") is None,
        other=_why(others),
    )


def text_of_ids(ids: Sequence[int]) -> str:
    """Token ids as text, one character each, for answers that have no other text."""
    return "".join(map(chr, ids))


def _why(others: set[str]) -> Why | None:
    if not others:
        return None
    return Why.TOOL_CALL if others & {"tool_calls", "function_call"} else Why.UNREADABLE
