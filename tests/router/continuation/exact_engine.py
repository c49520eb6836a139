"""Engines that return token ids of a known answer: chats, completions, `/generate` and vLLM's call with token ids."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from kvatlas_router.continuation.seam import DONE
from kvatlas_router.continuation.thoughts import Markers

PROMPT = (7, 8, 9)
FIRST_ID = 1_000
START, END = "<think>", "</think>"
MARKERS = Markers(START, END, (5, 6))
CALL, END_CALL = "<call>", "</call>"
"""The tokens around a tool call, which has one token for its name, and others for its arguments."""
OPENED = (*PROMPT, MARKERS.ids[0])
"""A prompt that begins the reasoning."""
_NAMES = count()


@dataclass(frozen=True, slots=True)
class ExactEngine:
    """Its answer's token ids count up from FIRST_ID; it continues after any prompt of ids. In its chats, everything between
    START and END is reasoning. `opened`: their prompt has the START. `strips`: they remove white space at the end of the
    reasoning, and send it late within. `whole`: events of `/generate` have the whole answer. `parts`: see `Engine`. `reason`:
    why it ends after its last token."""

    tokens: Sequence[str]
    whole: bool = True
    parts: Sequence[int] = (1,)
    opened: bool = False
    strips: bool = False
    reason: str = "length"

    @property
    def ids(self) -> list[int]:
        """The answer's token ids."""
        marks = dict(zip((START, END), MARKERS.ids, strict=True))
        return [marks.get(token, FIRST_ID + at) for at, token in enumerate(self.tokens)]

    def stream(self, body: dict[str, Any]) -> list[bytes]:
        """The events of its answer to a body."""
        asked = OPENED if self.opened else PROMPT
        prompt = next((body[name] for name in ("prompt", "token_ids", "input_ids") if name in body), asked)
        before = len(prompt) - len(asked)
        assert list(prompt) == [*asked, *self.ids[:before]]
        sampling = body.get("sampling_params", body)
        most = sampling.get("max_tokens", sampling.get("max_new_tokens"))
        left = range(before, min(len(self.tokens), before + most))
        name, events, done, parser = next(_NAMES), [], 0, _Parser(thinks=MARKERS.is_open(prompt), strips=self.strips)
        if "messages" in body:
            role = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
            shown = list(prompt) if body.get("return_token_ids") else None
            events.append(self._chunk(name, [role], before, 0, prompt_token_ids=shown))
        for turn in count():
            some = left[done : (done := done + self.parts[turn % len(self.parts)])]
            if not some:
                break
            ids, texts = [self.ids[at] for at in some], [self.tokens[at] for at in some]
            reason = None if some[-1] != left[-1] else self.reason if left[-1] + 1 == len(self.tokens) else "length"
            shown = ids if body.get("return_token_ids") else None
            if "input_ids" in body:
                events.append(self._output(name, left, done, some, reason))
            elif "token_ids" in body:
                choice = {"index": 0, "finish_reason": reason, "token_ids": ids}
                events.append(_event({"request_id": name, "usage": None, "output_mode": "tokens", "choices": [choice]}))
            else:
                said: dict[str, Any] = (
                    {"delta": parser.delta(texts)} if "messages" in body else {"text": "".join(texts)}
                )
                reason = parser.finish(reason)
                choice = {"index": 0, **said, "logprobs": None, "finish_reason": reason, "token_ids": shown}
                events.append(self._chunk(name, [choice], before, min(done, len(left)), reasons=parser.reasons))
        if body.get("stream_options"):
            events.append(self._chunk(name, [], before, len(left), reasons=parser.reasons))
        return [*events, DONE]

    def parse(self, body: dict[str, Any]) -> dict[str, Any]:
        """The answer of vLLM's `/v1/chat/completions/derender` for a part of a stream."""
        state, choice = body["stream_state"], body["generate_chunk"]["choices"][0]
        parser, replayed = _Parser(thinks=MARKERS.is_open(body["prompt_token_ids"]), strips=self.strips), 0
        for length in state["output_chunk_lens"]:
            parser.delta(self._texts(state["output_token_ids"][replayed : (replayed := replayed + length)]))
        assert replayed == len(state["output_token_ids"])
        delta: dict[str, Any] = {"role": None, "content": None, "reasoning": None}
        delta |= parser.delta(self._texts(choice["token_ids"]))
        for call in delta.get("tool_calls", ()):
            if "id" in call and call["index"] < len(state["last_tool_call_ids"]):
                call["id"] = state["last_tool_call_ids"][call["index"]]
        reason = parser.finish(choice["finish_reason"])
        parsed = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason, "stop_reason": None}
        return {"chunk": {"choices": [parsed]}, "stream_state": {}}

    def _texts(self, ids: Sequence[int]) -> list[str]:
        return [(START, END)[MARKERS.ids.index(id)] if id in MARKERS.ids else self.tokens[id - FIRST_ID] for id in ids]

    def _output(self, name: int, left: range, done: int, some: range, reason: str | None) -> bytes:
        at = left[:done] if self.whole else some
        done = min(done, len(left))
        meta = {
            "id": name,
            "finish_reason": reason and {"type": reason, "length": done},
            "prompt_tokens": len(PROMPT) + left.start,
            "output_token_logprobs": [[-0.5, FIRST_ID + one, None] for one in at],
            "completion_tokens": done,
            "cached_tokens": left.start // 2,
        }
        text = "".join(self.tokens[one] for one in at)
        return _event({"text": text, "output_ids": [FIRST_ID + one for one in at], "meta_info": meta})

    def _chunk(self, name: int, choices: list[Any], before: int, done: int, *, reasons: int = 0, **more: Any) -> bytes:
        prompt = len(OPENED if self.opened else PROMPT) + before
        usage: dict[str, Any] = {
            "prompt_tokens": prompt,
            "total_tokens": prompt + done,
            "completion_tokens": done,
            "completion_tokens_details": {"reasoning_tokens": reasons},
        }
        head = {"id": name, "object": "chunk", "created": name, "model": "m", **more}
        return _event({**head, "choices": choices, "usage": usage})


@dataclass(slots=True)
class _Parser:
    """vLLM's parser of reasoning and tool calls. `reasons`: tokens of reasoning. `calls`: begun calls."""

    thinks: bool
    strips: bool
    reasons: int = 0
    late: str = ""
    calls: int = 0
    place: str = ""
    """Within a call: the part that its next token belongs to."""

    def finish(self, reason: str | None) -> str | None:
        return "tool_calls" if reason == "stop" and self.calls else reason

    def delta(self, texts: Sequence[str]) -> dict[str, Any]:
        said, called = {"reasoning": self.late, "content": ""}, list[dict[str, Any]]()
        for text in texts:
            if text in (CALL, END_CALL):
                self.place, self.calls = "name" if text == CALL else "", self.calls + (text == CALL)
                continue
            if self.place:
                named = {"id": f"call-{next(_NAMES)}", "type": "function"} if self.place == "name" else {}
                called.append({"index": self.calls - 1, **named, "function": {self.place: text}})
                self.place = "arguments"
                continue
            if text in (START, END):
                self.thinks = text == START
                continue
            said["reasoning" if self.thinks else "content"] += text
            self.reasons += self.thinks
        if self.strips:
            whole = said["reasoning"]
            said["reasoning"] = whole.rstrip()
            self.late = whole[len(said["reasoning"]) :] if self.thinks else ""
        silent = {END, CALL, END_CALL} & {*texts[-1:]} or called
        return {
            name: text
            for name, text in said.items()
            if text or (name == "content" and not self.thinks and not any(said.values()) and not silent)
        } | ({"tool_calls": called} if called else {})


def _event(data: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(data, separators=(",", ":")).encode() + b"\n\n"
