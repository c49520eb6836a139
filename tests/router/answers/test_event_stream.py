"""Streams are read as they pass, however they are cut."""

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvatlas_router.answers.event_stream import EventStream
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


PLACES = st.lists(st.integers(0, 1_000), max_size=20)
MARKS = st.sampled_from([b"\n\n", b"\r\n\r\n", b"\r\r", b"\n\r\n", b"\r\n\n"])
FORMS = st.tuples(
    MARKS,
    st.sampled_from(
        [b"data: ", b"data:", b"event: message\ndata: ", b": ping\ndata: ", b"id: 7\r\ndata: ", b"retry: 5\rdata:"]
    ),
    st.sampled_from([b"", b"\xef\xbb\xbf"]),
)


def in_form(text: bytes, form: tuple[bytes, bytes, bytes]) -> bytes:
    mark, field, begin = form
    return begin + text.replace(b"\n\n", mark).replace(b"data: ", field)


@given(PLACES, FORMS, st.booleans())
def test_usage_that_was_not_asked_for_is_left_out_and_nothing_else(
    places: list[int], form: tuple[bytes, bytes, bytes], hold: bool
) -> None:
    stream = EventStream(hide_usage=True, hold=hold)
    text = in_form(WHOLE, form)
    passed = b"".join([*(stream.feed(part) for part in cut(text, places)), stream.end()])
    assert passed == text.replace(in_form(LAST, (*form[:2], b"")), b"") and stream.usage == USAGE
    assert (stream.parts, stream.done) == (3, True)


@given(PLACES, FORMS)
def test_bytes_pass_at_once_however_they_are_cut(places: list[int], form: tuple[bytes, bytes, bytes]) -> None:
    stream, text = EventStream(hide_usage=False), in_form(WHOLE, form)
    for part in cut(text, places):
        assert stream.feed(part) == part
    assert stream.end() == b"" and stream.usage == USAGE and stream.parts == 3


@given(st.binary(max_size=200), PLACES, st.booleans())
def test_any_bytes_pass_unchanged(text: bytes, places: list[int], hold: bool) -> None:
    stream = EventStream(hide_usage=True, hold=hold)
    assert b"".join([*(stream.feed(part) for part in cut(text, places)), stream.end()]) == text


@pytest.mark.parametrize(
    "choice",
    [
        {"index": 0, "delta": {"role": "assistant", "content": "", "tool_calls": None}, "finish_reason": None},
        {"index": 1, "text": "", "logprobs": None},
    ],
)
@pytest.mark.parametrize(
    "more",
    [
        {"delta": {"audio": {"data": "YQ=="}}},
        {"delta": {"images": [{}]}},
        {"finish_reason": "length"},
        {"stop_reason": 7},
    ],
)
def test_an_answer_begins_with_whatever_a_choice_has_besides_its_role(
    choice: dict[str, object], more: dict[str, object]
) -> None:
    stream = EventStream(hide_usage=True, hold=True)
    assert stream.feed(event({"choices": [choice]})) == b"" and not stream.begun
    assert stream.feed(event({"choices": [{**choice, **more}]})) and stream.begun


@pytest.mark.parametrize("text", [b'{"choices": 7}', b'{"choices": ["a"]}', b'{"choices": [}', b'[{"choices": []}]'])
def test_what_can_not_be_read_is_not_held_back(text: bytes) -> None:
    assert EventStream(hide_usage=False, hold=True).feed(b"data: " + text + b"\n\n")


@pytest.mark.parametrize("hide", [False, True])
def test_what_is_no_event_is_not_held_back(hide: bool) -> None:
    stream = EventStream(hide_usage=hide, hold=True)
    for part in (b"Hello", b" world", b"!"):
        assert stream.feed(part) == part


@given(PLACES)
def test_whole_events_pass_if_names_in_them_are_replaced(places: list[int]) -> None:
    stream = EventStream(hide_usage=False, whole=True)
    passed = b""
    for part in cut(WHOLE, places):
        passed += stream.feed(part)
        assert not passed or passed.endswith(b"\n\n")
    assert passed + stream.end() == WHOLE and stream.usage == USAGE


ROLE = event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
PINGS = [b": keep-alive\n\n", b"\n", b'event: ping\ndata: {"type": "ping"}\n\n', b"retry: 10\n\n"]
PREAMBLES = [
    ROLE,
    b'event: message_start\ndata: {"type": "message_start", "message": {"id": "m", "content": []}}\n\n',
    b'event: content_block_start\ndata: {"type": "content_block_start", "content_block": {"type": "text", "text": ""}}\n\n',
    b'event: response.created\ndata: {"response": {"id": "r", "instructions": "'
    + b"a" * 9_000
    + b'"}, "type": "response.created"}\n\n',
    b'data: {"type":"response.in_progress","response":{"id":"r","error":null}}\n\n',
]


@pytest.mark.parametrize("preamble", PREAMBLES)
def test_until_the_first_content_only_what_keeps_a_connection_alive_passes(preamble: bytes) -> None:
    stream = EventStream(hide_usage=False, hold=True)
    for ping in PINGS:
        assert stream.feed(ping) == ping
    assert stream.feed(preamble) == b"" and stream.feed(PINGS[0]) == PINGS[0]
    assert not stream.begun and stream.parts == 0
    assert stream.feed(CHOICES[0]) == preamble + CHOICES[0] and stream.begun


@pytest.mark.parametrize(
    "first",
    [
        DONE,
        b"data: some text\n\n",
        b'data: {"object": "image", "b64": "aaaa"}\n\n',
        b'data: {"text": "", "output_ids": [5]}\n\n',
        b'event: content_block_delta\ndata: {"type": "content_block_delta", "delta": {"type": "text_delta", "text": "Hi"}}\n\n',
        b'event: response.output_text.delta\ndata: {"delta": "Hi", "type": "response.output_text.delta"}\n\n',
        b'data: {"choices": [{"delta": {"content": "' + b"a" * 20_000,
    ],
)
def test_an_answer_begins_with_its_first_content_or_its_end(first: bytes) -> None:
    stream = EventStream(hide_usage=False, hold=True)
    assert stream.feed(ROLE) == b"" and stream.feed(first) == ROLE + first and stream.begun


@pytest.mark.parametrize("last", [b"[DONE]", b" [DONE] ", b"[done]", b'"[DONE]"', b"DONE"])
@pytest.mark.parametrize("head", [b"data:", b"data: ", b": bye\ndata: ", b"event: done\ndata: ", b"id: 3\rdata:"])
def test_the_end_is_found_in_any_spelling(head: bytes, last: bytes) -> None:
    stream = EventStream(hide_usage=True)
    stream.feed(CHOICES[0])
    assert not stream.done
    stream.feed(head + last + b"\n\n")
    assert stream.done


@pytest.mark.parametrize(
    "last",
    [
        b'event: message_stop\ndata: {"type":"message_stop"}\n\n',
        b'data: {"type":"message_stop"}\n\n',
        b'event: response.completed\ndata: {"response": {"output": []}, "type": "response.completed"}\n\n',
        b"event: response.completed\n" + event({"response": {"output": [{"content": [{"text": "all of it"}]}]}}),
        event({"type": "response.incomplete", "response": {"output": [{"content": [{"text": "all of it"}]}]}}),
    ],
)
def test_other_protocols_ends_are_ends_and_no_part_of_the_answer(last: bytes) -> None:
    """Some of them repeat the whole answer."""
    stream = EventStream(hide_usage=False)
    stream.feed(last)
    assert stream.done and not stream.parts


def choice(index: int, finish: object = None) -> bytes:
    return event({"choices": [{"index": index, "text": "a", "finish_reason": finish}], "usage": None})


def generated(index: int, finish: object = None) -> bytes:
    return event({"text": "a", "meta_info": {"finish_reason": finish}, "index": index})


OTHER = event({"seconds": 2, "text": "a"})
BOTH = event({"choices": [{"index": 0, "finish_reason": "stop"}, {"index": 1, "finish_reason": "length"}]})


@pytest.mark.parametrize(
    ("events", "choices", "whole"),
    [
        ([choice(0), choice(0, "stop")], 1, True),
        ([choice(0), choice(0, "stop"), OTHER, OTHER], 1, True),
        ([choice(0), OTHER, choice(0)], 1, False),
        ([choice(0), choice(1, "stop"), choice(0)], 2, False),
        ([choice(0), choice(1, "stop"), choice(1, "stop")], 2, False),
        ([choice(0), choice(1, "stop"), choice(0, "length"), OTHER], 2, True),
        ([choice(0), BOTH], 2, True),
        ([choice(0), BOTH], 3, False),
        ([choice(0), choice(1), LAST], 2, True),
        ([generated(0), generated(1, {"type": "stop"}), generated(0)], 2, False),
        ([generated(0), generated(1, {"type": "stop"}), generated(0, {"type": "length", "length": 2})], 2, True),
    ],
)
@given(places=PLACES, hold=st.booleans(), hide=st.booleans())
def test_an_answer_is_whole_when_each_choice_has_ended_however_it_is_cut(
    events: list[bytes], choices: int, whole: bool, places: list[int], hold: bool, hide: bool
) -> None:
    text = b"".join(events)
    for pieces in (cut(text, places), events):
        stream = EventStream(hide_usage=hide, hold=hold, choices=choices)
        for piece in pieces:
            stream.feed(piece)
        stream.end()
        assert stream.finished is whole


def test_nothing_behind_the_final_event_makes_an_answer_a_failed_one() -> None:
    stream = EventStream(hide_usage=False)
    text = CHOICES[0] + DONE + event(ERROR)
    assert stream.feed(text) + stream.end() == text
    assert stream.done and stream.error is None


ERROR = {"error": {"message": "EngineCore died", "type": "InternalServerError", "param": None, "code": 500}}


@pytest.mark.parametrize(
    ("text", "status"),
    [
        (event(ERROR), 500),
        (b"event: error\n" + event({"type": "error", "error": {"type": "overloaded_error", "message": "full"}}), 503),
        (b"event: error\n" + event({"type": "error", "code": "server_error", "message": "full", "param": None}), 502),
        (b"event: error\ndata: it broke\n\n", 502),
        (event({"error": "it broke"}), 502),
        (event({"error": {"message": "too long", "type": "BadRequestError", "code": 400}}), 400),
        (event({"object": "error", "message": "no", "type": "BadRequestError", "code": "400"}), 400),
        (event({"type": "response.failed", "response": {"error": {"code": "server_error", "message": "x"}}}), 502),
        (
            event({"text": "", "meta_info": {"finish_reason": {"type": "abort", "message": "x", "status_code": 503}}}),
            503,
        ),
    ],
)
def test_an_error_is_no_answer(text: bytes, status: int) -> None:
    stream = EventStream(hide_usage=False, hold=True)
    assert stream.feed(ROLE + text) == b"" and stream.error is not None and stream.error.status == status


def test_an_error_before_the_first_content_passes_only_if_nothing_is_held() -> None:
    held, plain = EventStream(hide_usage=True, hold=True), EventStream(hide_usage=True)
    assert held.feed(ROLE + event(ERROR) + DONE) + held.end() == b"" and not held.begun
    assert plain.feed(ROLE + event(ERROR)) == ROLE + event(ERROR) and plain.error is not None


@pytest.mark.parametrize(
    "body",
    [
        {"choices": [{"delta": {"content": '{"error": {"message": "an example"}}'}}]},
        {"type": "response.in_progress", "response": {"error": None}},
        {"choices": [{"delta": {"content": "a"}, "error": None}], "error": None},
        {"text": "a", "meta_info": {"finish_reason": {"type": "abort", "message": "the client left"}}},
        {"text": "abort", "meta_info": {"finish_reason": "abort"}},
    ],
)
def test_a_text_about_an_error_is_none(body: object) -> None:
    stream = EventStream(hide_usage=False)
    stream.feed(event(body))
    assert stream.error is None


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


BODIES = st.sampled_from(
    [
        {**CHUNK, "choices": [{"delta": {"content": "Hi"}}]},
        {**CHUNK, "choices": [{"delta": {"content": ""}, "finish_reason": "stop"}], "usage": None},
        {**CHUNK, "choices": [{"delta": {"tool_calls": [{"type": "function", "function": {"arguments": "{"}}]}}]},
        {**CHUNK, "choices": [{"delta": {"content": 'a\nb "usage" "error"'}}]},
        {"choices": [], "usage": TOLD},
        {"choices": [{"text": "a"}], "usage": TOLD},
        {"type": "response.output_text.delta", "delta": "Hi"},
        {"type": "response.completed"},
        {"type": "ping"},
        {"error": {"message": "no", "code": 503}},
        {"error": None, "choices": [{"text": "x" * 5_000}]},
        {"text": "a", "meta_info": {"finish_reason": {"type": "abort", "status_code": 500}}},
    ]
)


class ThoroughStream(EventStream):
    """Reads every event in full."""

    def _passes_plainly(self, piece: bytes) -> bool:
        return False


@given(st.lists(BODIES, max_size=8), st.booleans(), st.booleans(), st.sampled_from([b"", b": c\n\n", b"event: x\n"]))
def test_plain_events_pass_as_if_they_were_read_in_full(
    bodies: list[object], hide: bool, hold: bool, between: bytes
) -> None:
    quick, thorough = EventStream(hide_usage=hide, hold=hold), ThoroughStream(hide_usage=hide, hold=hold)
    for piece in [*(between + event(body) for body in bodies), DONE]:
        assert quick.feed(piece) == thorough.feed(piece)
        for name in ("usage", "error", "parts", "events", "done", "begun", "in_event", "finished"):
            assert getattr(quick, name) == getattr(thorough, name), name
    assert quick.end() == thorough.end()
