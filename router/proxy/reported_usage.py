"""An answer's reported usage and measured times, for every component that relays answers."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kvatlas.runtime.json_text import decode
from kvatlas_router.tokens.text_request import TextRequest
from router_client.learning.timings import AnswerClock, Timings
from router_client.learning.token_counts import Usage


def usage_fields(text: TextRequest) -> Mapping[str, Any]:
    """Fields that a streamed request needs for the stream to end with its usage."""
    options = text.body.get("stream_options")
    if options is not None and not isinstance(options, dict):
        return {}  # the engine refuses it
    return {"stream_options": {**(options or {}), "include_usage": True}}


def usage_of_body(body: bytes) -> Usage | None:
    """The usage in a whole answer."""
    if b'"usage"' not in body and b'"meta_info"' not in body:
        return None
    try:
        return Usage.of(decode(body))
    except ValueError:
        return None


def usage_of_one_answer(text: TextRequest, usage: Usage | None) -> Usage | None:
    """The usage of one answer; for several answers to one prompt, their mean. None for several prompts: only the first of
    them was routed, so there is nothing to compare or learn."""
    if usage is None or text.prompts > 1:
        return None
    return usage if text.choices == 1 else replace(usage, completion_tokens=usage.completion_tokens // text.choices)


def timings_of(text: TextRequest, clock: AnswerClock, usage: Usage | None) -> Timings | None:
    """The measured times; None if the tokens belong to several answers."""
    if usage is None or text.choices > 1:
        return None
    return clock.timings(usage.completion_tokens)
