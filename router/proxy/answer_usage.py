"""The usage that an answer tells, and the times that were measured of it: for whoever passes a request's answer on."""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kvatlas_router.tokens.text_request import TextRequest
from router_client.learning.timings import AnswerClock, Timings
from router_client.learning.usage import Usage


def usage_fields(text: TextRequest) -> Mapping[str, Any]:
    """What a streamed request's body needs, so that the stream ends with its usage."""
    options = text.body.get("stream_options")
    if options is not None and not isinstance(options, dict):
        return {}  # the engine refuses it
    return {"stream_options": {**(options or {}), "include_usage": True}}


def usage_of_body(body: bytes) -> Usage | None:
    """The usage in a whole answer."""
    if b'"usage"' not in body and b'"meta_info"' not in body:
        return None
    try:
        return Usage.of(json.loads(body))
    except ValueError:
        return None


def usage_of_one_answer(text: TextRequest, usage: Usage | None) -> Usage | None:
    """Of several answers to one prompt their mean. None for several prompts: only the first was routed, so nothing can be
    compared or learned."""
    if usage is None or text.prompts > 1:
        return None
    return replace(usage, completion_tokens=usage.completion_tokens // text.choices)


def timings_of(text: TextRequest, clock: AnswerClock, usage: Usage | None) -> Timings | None:
    """None if the tokens are those of several answers."""
    if usage is None or text.choices > 1:
        return None
    return clock.timings(usage.completion_tokens)
