"""Streams of SGLang's `/generate`: each event holds the whole answer so far (with `--incremental-streaming-output`, a part
of it) and the request's metadata."""

import json
from array import array
from collections.abc import Mapping
from typing import Any

from kvatlas.runtime.json_text import decode
from kvatlas_router.continuation.chunk import Chunk, text_of_ids
from kvatlas_router.continuation.reasons import CannotContinue, Why

_OF_TOKENS = ("output_token_logprobs", "output_top_logprobs", "output_token_ids_logprobs")
"""Metadata with one item per token."""


class GenerateEvents:
    """Reads events, and writes those of later engines as the first one's. `whole`: each event holds the whole answer; None:
    not known, since only one event has arrived. Until it is known, the next engine's events are held back if they say more
    than the client has."""

    def __init__(self) -> None:
        self.whole: bool | None = None
        self._id: object = None
        self._data: dict[str, Any] = {}
        self._seen, self._seen_text = 0, 0
        self._client_ids: int | None = None
        """The ids that the client has, if another engine repeats them before `whole` is known."""
        self._held = False
        self._ids, self._text = array("q"), ""
        """The ids of the answer's part that is in the current engine's prompt."""
        self._of_tokens: dict[str, list[Any]] = {}

    def read(self, data: bytes) -> Chunk:
        """Read the next event of an engine. Raises CannotContinue if it is not known which part of the event the client
        lacks."""
        try:
            decoded = decode(data)
        except ValueError:
            return Chunk(other=Why.UNREADABLE)
        meta = decoded.get("meta_info") if isinstance(decoded, dict) else None
        if not isinstance(meta, dict) or not isinstance(ids := decoded.get("output_ids"), list) or "index" in decoded:
            return Chunk(other=Why.UNREADABLE)
        if not isinstance(text := decoded.get("text", text_of_ids(ids)), str):
            return Chunk(other=Why.UNREADABLE)
        if meta.get("completion_tokens") != len(ids):
            self.whole = False
        elif self._seen or self._held:
            self.whole = True
        reason = meta.get("finish_reason")
        if self._held and self.whole is False:
            raise CannotContinue(Why.DIVERGED)
        if self.whole is None and self._client_ids is not None and (reason or len(ids) > self._client_ids):
            if reason:
                raise CannotContinue(Why.DIVERGED)
            self._held = True
            return Chunk(opens=True)
        self._data = decoded
        self._id = self._id or meta.get("id")
        if self.whole:
            new_ids, new_text = ids[self._seen :], text[self._seen_text :]
            self._seen, self._seen_text = len(ids), len(text)
        else:
            new_ids, new_text = ids, text
            self._seen, self._seen_text = self._seen + len(ids), self._seen_text + len(text)
        finish = reason.get("type") if isinstance(reason, dict) else None
        matched = reason.get("matched") if isinstance(reason, dict) else None
        cached = meta.get("cached_tokens")
        return Chunk(
            text=new_text,
            ids=new_ids,
            finish=finish if isinstance(finish, str) else None,
            stop=matched if isinstance(matched, str) else None,
            usage={**meta, "prompt_tokens_details": {"cached_tokens": cached}},
        )

    def resume(self, ids: "array[int]", text: str) -> None:
        """From now on, read the events of another engine's answer, which continues after these ids and this text."""
        meta = self._data.get("meta_info", {})
        written = len(self._ids)
        for name in _OF_TOKENS:
            if isinstance(listed := meta.get(name), list) and self.whole:
                self._of_tokens[name] = [*self._of_tokens.get(name, ())[:written], *listed][: len(ids)]
        self._ids, self._text = ids[:], text
        if self.whole is None:
            self._client_ids = max(self._client_ids or 0, self._seen)
        self._held = False
        self._seen = self._seen_text = 0

    def write(self, raw: bytes, usage: Mapping[str, Any], *, repeats: bool) -> bytes:
        """The event that was read last, rewritten as one of the first engine's. `usage`: that of the whole answer.
        `repeats`: the client already has the text of this event."""
        decoded = self._data
        meta = {**decoded["meta_info"], **{name: usage[name] for name in usage if name in decoded["meta_info"]}}
        meta["id"] = self._id
        if "cached_tokens" in meta:
            meta["cached_tokens"] = usage["prompt_tokens_details"]["cached_tokens"]
        reason = meta.get("finish_reason")
        if isinstance(reason, dict) and type(length := reason.get("length")) is int:
            meta["finish_reason"] = {**reason, "length": length + len(self._ids)}
        if self.whole:
            text, listed = self._text + decoded.get("text", ""), [*self._ids, *decoded["output_ids"]]
            for name in _OF_TOKENS:
                if isinstance(meta.get(name), list):
                    meta[name] = [*self._of_tokens.get(name, ()), *meta[name]]
        else:
            text, listed = ("", []) if repeats else (decoded.get("text", ""), decoded["output_ids"])
        changed = {**decoded, "output_ids": listed, "meta_info": meta} | ({"text": text} if "text" in decoded else {})
        said = json.dumps(changed, separators=(",", ":"), ensure_ascii=raw.isascii())
        return b"data: " + said.encode() + b"\n\n"
