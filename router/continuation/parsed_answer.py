"""Answers with tool calls, which only the engines' own parser can read.

vLLM's `/v1/chat/completions/derender` (0.33, with `--enable-scale-out`) first replays the earlier tokens, in the events in
which they arrived, and then parses the new ones. So its parser continues where the client's last event ended. Each token
makes it slower: it takes 14 ms after 50 tokens and 124 ms after 1,000.
"""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvatlas_router.continuation.chunk import Chunk
from kvatlas_router.continuation.cuts import Rest
from kvatlas_router.continuation.reasons import CannotContinue, Why
from kvatlas_router.tokens.text_request import Api, TextRequest

DERENDER = f"{Api.CHAT}/derender"


@dataclass(frozen=True, slots=True)
class ParsedPart:
    """What a parser has read: the delta and, if the answer ends there, its finish and stop reasons. `ids`: the
    tokens."""

    delta: Mapping[str, Any]
    ids: Sequence[int]
    finish: str | None = None
    stop: object = None


class ParsedAnswer:
    """The tokens of one answer. The client has everything that they say, except for the `unread` ones.

    `has_call`: the client has part of a tool call. `knows_ids`: all tokens are known. `prompt_ids`: the ids that
    precede the answer's `ids`. `finish`: the reason with which the last engine ended it.
    """

    def __init__(self, text: TextRequest) -> None:
        self._text = text
        self.begin(0)

    def begin(self, before: int) -> None:
        """From now on, tokens come from an engine that parses them itself. `before`: how many of the answer's
        tokens are in that engine's prompt."""
        self.has_call, self.knows_ids = False, True
        self.finish: str | None = None
        self.prompt_ids, self.ids, self.unread = array("q"), array("q"), array("q")
        self._before = before
        self._lengths: list[int] = []
        """The number of tokens in each event."""
        self._call_ids: list[str] = []
        self._last_call: tuple[int, Sequence[Mapping[str, Any]]] = 0, ()
        """The last event with a part of a call: the number of events before it, and the part."""
        self._again = array("q")
        """Tokens that the next engine must repeat."""
        self._is_complete = False

    def learn(self, chunk: Chunk) -> None:
        """Read an event of such an engine."""
        if not self.prompt_ids:
            self.prompt_ids.extend(chunk.prompt_ids or ())
        if not chunk.has_choice or chunk.opens:
            return
        self.knows_ids = self.knows_ids and chunk.ids is not None and bool(self.prompt_ids)
        if self.knows_ids:
            self._record(chunk.ids or (), chunk.calls, finish=chunk.finish)

    def _record(self, ids: Sequence[int], calls: Sequence[Mapping[str, Any]], *, finish: str | None) -> None:
        if calls:
            self.has_call, self._last_call = True, (len(self._lengths), calls)
            self._call_ids += [call["id"] for call in calls if isinstance(call.get("id"), str)]
        if ids:
            self.ids.extend(ids)
            self._lengths.append(len(ids))
        self.finish, self._is_complete = finish, finish is not None

    # ------------------------------------------------------------ the rest

    @property
    def rest(self) -> Rest:
        """What the next engine has to generate. If the answer's end is known, that is only the last token, which is needed
        for the usage."""
        tokens = self._before + len(self.ids) + len(self.unread) - (self.finish is not None)
        return Rest(tokens=tokens, by_ids=True, parsed=True)

    @property
    def known_ids(self) -> Sequence[int]:
        """Those of the answer's token ids that the next engine gets."""
        ids = [*self.ids, *self.unread]
        return ids if self.finish is None else ids[:-1]

    def resume(self) -> None:
        """From now on, tokens come from another engine, which does not parse them."""
        if self.finish is None:
            return
        self.finish = None
        if self.unread:
            self.unread.pop()
        else:
            self._again = self.ids[-1:]

    def add(self, chunk: Chunk) -> None:
        """Read an event of that engine. Raises CannotContinue if the event does not repeat what the client has."""
        if chunk.ids is None:
            raise CannotContinue(Why.UNREADABLE)
        ids = array("q", chunk.ids)
        repeated, ids = ids[: len(self._again)], ids[len(self._again) :]
        if repeated != self._again[: len(repeated)] or (self._is_complete and ids):
            raise CannotContinue(Why.DIVERGED)
        self._again = self._again[len(repeated) :]
        self.unread.extend(ids)
        self.finish = chunk.finish

    @property
    def is_unread(self) -> bool:
        """True if the client lacks what was generated."""
        return bool(self.unread) or self.has_unread_end

    @property
    def has_unread_end(self) -> bool:
        """True if the client also lacks the answer's end, although it has been generated."""
        return self.finish is not None and not self._is_complete

    # ------------------------------------------------------------ the parser

    @property
    def question(self) -> dict[str, Any]:
        """The body that asks what the unread tokens say."""
        return self._question(len(self._lengths), self.unread, self.finish)

    def read(self, answer: Any) -> ParsedPart:
        """Read the answer to `question`, which the client gets now. Raises CannotContinue."""
        part = self._part(answer, self.unread)
        if part.delta.get("reasoning") or (part.finish is None) != (self.finish is None):
            raise CannotContinue(Why.TOOL_CALL)
        calls = part.delta.get("tool_calls", ())
        self._record(self.unread, calls, finish=self.finish)
        self.unread = array("q")
        return part

    @property
    def check_question(self) -> dict[str, Any] | None:
        """The body that asks how the parser reads the last part of a call, which the client already has. None if nothing
        is left to parse."""
        if self._is_complete:
            return None
        before = self._last_call[0]
        start = sum(self._lengths[:before])
        return self._question(before, self.ids[start : start + self._lengths[before]], None)

    def check(self, answer: Any) -> None:
        """Check the answer to `check_question`. Raises CannotContinue if the client has something else, which means that the
        parsers differ."""
        calls = self._part(answer, ()).delta.get("tool_calls", ())
        if [_said(call) for call in calls] != [_said(call) for call in self._last_call[1]]:
            raise CannotContinue(Why.TOOL_CALL)

    def _question(self, events: int, ids: "array[int]", finish: str | None) -> dict[str, Any]:
        lengths = self._lengths[:events]
        state = {
            "role_sent": True,
            "tools_streamed": True,
            "output_token_ids": self.ids[: sum(lengths)].tolist(),
            "output_chunk_lens": lengths,
            "last_tool_call_ids": self._call_ids,
        }
        choice = {"index": 0, "token_ids": ids.tolist(), "finish_reason": finish}
        return {
            "stream": True,
            "model": self._text.model,
            "chat_request": self._text.body,
            "prompt_token_ids": self.prompt_ids.tolist(),
            "generate_chunk": {"choices": [choice]},
            "stream_state": state,
        }

    @staticmethod
    def _part(answer: Any, ids: Sequence[int]) -> ParsedPart:
        try:
            choice = answer["chunk"]["choices"][0]
            delta = {name: value for name, value in choice["delta"].items() if value}
            delta |= (
                {"tool_calls": [_without_nulls(call) for call in calls]} if (calls := delta.get("tool_calls")) else {}
            )
            return ParsedPart(delta, list(ids), choice["finish_reason"], choice.get("stop_reason"))
        except (LookupError, TypeError, AttributeError) as error:
            raise CannotContinue(Why.TOOL_CALL) from error


def check_guide(rendered: Any) -> None:
    """Check the request as an engine renders it. Raises CannotContinue if a grammar guides its tool calls."""
    sampling = rendered.get("sampling_params") if isinstance(rendered, dict) else None
    if not isinstance(sampling, dict):
        raise CannotContinue(Why.TOOL_CALL)
    if sampling.get("structured_outputs") is not None:
        raise CannotContinue(Why.GUIDED)


def _without_nulls(call: Mapping[str, Any]) -> dict[str, Any]:
    function = {name: value for name, value in (call.get("function") or {}).items() if value is not None}
    said = {name: value for name, value in call.items() if value is not None}
    return {**said, "function": function} if function else said


def _said(call: Mapping[str, Any]) -> tuple[object, ...]:
    function = call.get("function") or {}
    return call.get("index"), call.get("id"), function.get("name"), function.get("arguments")
