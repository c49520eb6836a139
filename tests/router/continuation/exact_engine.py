"""Engines that give token ids, with an answer that is known: chats, completions, `/generate` and vLLM's call with token ids."""

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
OPENED = (*PROMPT, MARKERS.ids[0])
"""A prompt that begins the reasoning."""
_NAMES = count()


@dataclass(frozen=True, slots=True)
class ExactEngine:
    """Its answer's token ids are FIRST_ID and those that follow; it goes on behind any prompt of ids. What is between START and
    END is reasoning in its chats. `opened`: their prompt has the START. `strips`: they have no white space at the end of the
    reasoning, and send it late within. `whole`: events of `/generate` have the whole answer. `parts`: see `Engine`."""

    tokens: Sequence[str]
    whole: bool = True
    parts: Sequence[int] = (1,)
    opened: bool = False
    strips: bool = False

    @property
    def ids(self) -> list[int]:
        """The answer's."""
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
            shown = list(asked) if body.get("return_token_ids") else None
            events.append(self._chunk(name, [role], before, 0, prompt_token_ids=shown))
        for turn in count():
            some = left[done : (done := done + self.parts[turn % len(self.parts)])]
            if not some:
                break
            ids, texts = [self.ids[at] for at in some], [self.tokens[at] for at in some]
            reason = "length" if some[-1] == left[-1] else None
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
                choice = {"index": 0, **said, "logprobs": None, "finish_reason": reason, "token_ids": shown}
                events.append(self._chunk(name, [choice], before, min(done, len(left)), reasons=parser.reasons))
        if body.get("stream_options"):
            events.append(self._chunk(name, [], before, len(left), reasons=parser.reasons))
        return [*events, DONE]

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
    """vLLM's, of reasoning. `reasons`: tokens of it."""

    thinks: bool
    strips: bool
    reasons: int = 0
    late: str = ""

    def delta(self, texts: Sequence[str]) -> dict[str, str]:
        said = {"reasoning": self.late, "content": ""}
        for text in texts:
            if text in (START, END):
                self.thinks = text == START
                continue
            said["reasoning" if self.thinks else "content"] += text
            self.reasons += self.thinks
        if self.strips:
            whole = said["reasoning"]
            said["reasoning"] = whole.rstrip()
            self.late = whole[len(said["reasoning"]) :] if self.thinks else ""
        return {
            name: text
            for name, text in said.items()
            if text or (name == "content" and not self.thinks and not any(said.values()) and texts[-1] != END)
        }


def _event(data: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(data, separators=(",", ":")).encode() + b"\n\n"
