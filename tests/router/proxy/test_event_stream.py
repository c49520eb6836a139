"""Streams are read while they pass, however they are cut."""

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvatlas_router.proxy.event_stream import EventStream
from kvatlas_router.tokens import Usage

TOLD = {"prompt_tokens": 5, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}}
USAGE = Usage(5, 2, 4)


def event(body: object) -> bytes:
    return b"data: " + json.dumps(body).encode() + b"\n\n"


CHOICES = [event({"choices": [{"text": f'"usage" {i}\n\n'}]}) for i in range(3)]
LAST = event({"choices": [], "usage": TOLD})
DONE = b"data: [DONE]\n\n"
WHOLE = b"".join(CHOICES) + LAST + DONE


def cut(text: bytes, places: list[int]) -> list[bytes]:
    at = sorted({0, len(text), *(place % (len(text) + 1) for place in places)})
    return [text[a:b] for a, b in pairwise(at)]


@given(st.lists(st.integers(0, 1_000), max_size=20), st.sampled_from([b"\n\n", b"\r\n\r\n"]))
def test_usage_that_was_not_asked_for_is_left_out_and_nothing_else(places: list[int], mark: bytes) -> None:
    stream = EventStream(hide_usage=True)
    text = WHOLE.replace(b"\n\n", mark)
    passed = b"".join([*(stream.feed(part) for part in cut(text, places)), stream.end()])
    assert passed == text.replace(LAST.replace(b"\n\n", mark), b"") and stream.usage == USAGE


@given(st.lists(st.integers(0, 1_000), max_size=20))
def test_only_whole_events_pass_so_that_an_error_event_may_follow_any_of_them(places: list[int]) -> None:
    stream = EventStream(hide_usage=False)
    passed = b""
    for part in cut(WHOLE, places):
        passed += stream.feed(part)
        assert not passed or passed.endswith(b"\n\n")
    assert passed + stream.end() == WHOLE and stream.usage == USAGE


@pytest.mark.parametrize("end", [b"", b"\n"])
def test_a_last_event_without_its_empty_line_passes_too(end: bytes) -> None:
    stream = EventStream(hide_usage=True)
    rest = DONE.rstrip() + end
    assert stream.feed(CHOICES[0] + rest) + stream.end() == CHOICES[0] + rest


def test_usage_in_every_event_stays_where_there_are_choices() -> None:
    stream = EventStream(hide_usage=True)
    each = event({"choices": [{"text": "a"}], "usage": TOLD})
    none = event({"choices": [{"text": "a"}], "usage": None})
    broken = b'data: {"usage"\n\n'
    assert stream.feed(none + each + broken) == none + each + broken and stream.usage == USAGE


CHUNK = {"id": "c", "object": "chat.completion.chunk", "model": "m"}


@pytest.mark.parametrize(
    ("body", "parts"),
    [
        ({**CHUNK, "choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]}, 0),
        ({**CHUNK, "choices": [{"index": 0, "delta": {"role": "assistant", "content": None}}]}, 0),
        ({**CHUNK, "choices": [{"index": 0, "delta": {"content": "Hi"}, "finish_reason": None}]}, 1),
        ({**CHUNK, "choices": [{"index": 0, "delta": {"content": '"'}}]}, 1),
        ({"type": "response.created", "response": {"output": [], "text": {"format": {}}}}, 0),
        ({"type": "response.output_text.delta", "delta": "Hi"}, 1),
        ({"type": "content_block_start", "content_block": {"type": "text", "text": ""}}, 0),
        ({"type": "content_block_delta", "delta": {"type": "thinking_delta", "thinking": "Hm"}}, 1),
        ({**CHUNK, "choices": [{"index": 0, "delta": {"content": None, "reasoning_content": "Hm"}}]}, 1),
        ({**CHUNK, "choices": [{"index": 0, "delta": {"reasoning": "Hm"}}]}, 1),
        (
            {
                **CHUNK,
                "choices": [{"delta": {"tool_calls": [{"index": 0, "function": {"name": "f", "arguments": ""}}]}}],
            },
            1,
        ),
        ({**CHUNK, "choices": [{"delta": {"tool_calls": [{"index": 0, "function": {"arguments": '{"a'}}]}}]}, 1),
        ({**CHUNK, "choices": [{"delta": {"content": "", "tool_calls": []}, "finish_reason": "stop"}]}, 0),
        ({**CHUNK, "choices": [{"delta": {"content": ""}, "logprobs": {"content": []}, "finish_reason": "stop"}]}, 0),
        ({**CHUNK, "choices": [], "usage": TOLD}, 0),
        ({"choices": [{"text": "Hi", "finish_reason": None}]}, 1),
        ({"choices": [{"text": "", "finish_reason": "length"}]}, 0),
        ({"choices": [{"text": "", "prompt_token_ids": [1, 2], "token_ids": []}]}, 0),
        ({"choices": [{"text": "", "token_ids": [17]}]}, 1),
    ],
)
@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": ")])
def test_only_events_with_a_part_of_the_answer_are_parts(body: object, parts: int, separators: tuple[str, str]) -> None:
    stream = EventStream(hide_usage=False)
    stream.feed(b"data: " + json.dumps(body, separators=separators).encode() + b"\n\n" + DONE)
    assert stream.parts == parts
