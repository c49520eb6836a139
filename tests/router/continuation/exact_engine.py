"""Engines that give token ids, with an answer that is known: chats, completions, `/generate` and vLLM's call with token ids."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from kvatlas_router.continuation.seam import DONE

PROMPT = (7, 8, 9)
FIRST_ID = 1_000
_NAMES = count()


@dataclass(frozen=True, slots=True)
class ExactEngine:
    """Its answer's token ids are FIRST_ID and those that follow; it goes on behind any prompt of ids. `reasons`: tokens that
    its chats give as reasoning. `whole`: events of `/generate` have the whole answer. `parts`: see `Engine`."""

    tokens: Sequence[str]
    reasons: int = 0
    whole: bool = True
    parts: Sequence[int] = (1,)

    def stream(self, body: dict[str, Any]) -> list[bytes]:
        """The events of its answer to a body."""
        prompt = next((body[name] for name in ("prompt", "token_ids", "input_ids") if name in body), PROMPT)
        before = len(prompt) - len(PROMPT)
        assert list(prompt) == [*PROMPT, *range(FIRST_ID, FIRST_ID + before)]
        sampling = body.get("sampling_params", body)
        most = sampling.get("max_tokens", sampling.get("max_new_tokens"))
        left = range(before, min(len(self.tokens), before + most))
        name, events, done = next(_NAMES), [], 0
        if "messages" in body:
            role = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
            shown = list(PROMPT) if body.get("return_token_ids") else None
            events.append(self._chunk(name, [role], before, 0, prompt_token_ids=shown))
        for turn in count():
            some = left[done : (done := done + self.parts[turn % len(self.parts)])]
            if not some:
                break
            ids, text = [FIRST_ID + at for at in some], "".join(self.tokens[at] for at in some)
            reason = "length" if some[-1] == left[-1] else None
            shown = ids if body.get("return_token_ids") else None
            if "input_ids" in body:
                events.append(self._output(name, left, done, some, reason))
            elif "token_ids" in body:
                choice = {"index": 0, "finish_reason": reason, "token_ids": ids}
                events.append(_event({"request_id": name, "usage": None, "output_mode": "tokens", "choices": [choice]}))
            else:
                kind = "reasoning" if some[0] < self.reasons else "content"
                said: dict[str, Any] = {"delta": {kind: text}} if "messages" in body else {"text": text}
                choice = {"index": 0, **said, "logprobs": None, "finish_reason": reason, "token_ids": shown}
                events.append(self._chunk(name, [choice], before, min(done, len(left))))
        if body.get("stream_options"):
            events.append(self._chunk(name, [], before, len(left)))
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

    @staticmethod
    def _chunk(name: int, choices: list[Any], before: int, done: int, **more: Any) -> bytes:
        prompt = len(PROMPT) + before
        usage = {"prompt_tokens": prompt, "total_tokens": prompt + done, "completion_tokens": done}
        head = {"id": name, "object": "chunk", "created": name, "model": "m", **more}
        return _event({**head, "choices": choices, "usage": usage})


def _event(data: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(data, separators=(",", ":")).encode() + b"\n\n"
