"""What the picker reads from an answer that passes through it."""

import json
from collections.abc import Iterable

from kvatlas_router.gateway.answer_reader import AnswerReader
from kvatlas_router.proxy.headers import RawHeaders
from kvatlas_router.tokens.text_request import Api, TextRequest
from router_client import AnswerClock, Timings

TEXT = TextRequest(Api.CHAT, {"messages": [{"role": "user", "content": "Hi"}]})
USAGE = {"prompt_tokens": 20, "completion_tokens": 4}
EVENTS: RawHeaders = [(b"content-type", b"text/event-stream; charset=utf-8")]
JSON: RawHeaders = [(b"content-type", b"application/json")]


def event(delta: dict[str, str], **more: object) -> bytes:
    return b"data: " + json.dumps({"choices": [{"index": 0, "delta": delta}], **more}).encode() + b"\n\n"


def read(headers: RawHeaders, parts: Iterable[tuple[float, bytes]]) -> tuple[AnswerReader, list[float]]:
    """The reader after these parts, each given with its time of arrival in milliseconds, and the times of content."""
    now = [0]
    reader = AnswerReader(TEXT, hides_usage=False, clock=AnswerClock(lambda: now[0]))
    reader.begin(200, headers)
    with_content = []
    for ms, part in parts:
        now[0] = int(ms * 1e6)
        reader.feed(part, last=False)
        if reader.has_content:
            with_content.append(ms)
    reader.feed(b"", last=True)
    reader.end()
    return reader, with_content


def test_only_events_with_content_are_timed() -> None:
    """A role, a finish reason, the usage and the end are not tokens; if they counted, a short answer would look many times as
    fast."""
    reader, with_content = read(
        EVENTS,
        [
            (5, event({"role": "assistant", "content": ""})),
            (50, event({"content": "a"})),
            (58, event({"content": "b"})),
            (66, event({"content": "c"})),
            (66.1, event({"content": ""}, finish_reason="stop")),
            (66.2, b"data: " + json.dumps({"choices": [], "usage": USAGE}).encode() + b"\n\n"),
            (66.3, b"data: [DONE]\n\n"),
        ],
    )
    assert reader.is_stream and with_content[0] == 50
    assert reader.timings == Timings(50_000, 8_000)


def test_a_stream_without_its_end_is_no_answer() -> None:
    begun = (5, event({"content": "a"}))
    ended, _ = read(EVENTS, [begun, (6, event({"content": "b"}, finish_reason="stop"))])
    cut, _ = read(EVENTS, [begun])
    assert ended.error is None
    assert cut.error is not None and cut.error.status == 502


def test_the_pieces_of_a_whole_answer_are_no_tokens() -> None:
    body = json.dumps({"choices": [{"message": {"content": "abc"}}], "usage": USAGE}).encode()
    reader, with_content = read(JSON, [(50, body[:20]), (50.1, body[20:40]), (50.2, body[40:])])
    assert not reader.is_stream and with_content[0] == 50
    assert reader.usage is not None and reader.usage.completion_tokens == 4
    assert reader.timings == Timings()


def test_a_stream_is_one_also_where_it_is_not_read() -> None:
    for headers in (EVENTS, [*EVENTS, (b"content-encoding", b"gzip")]):
        reader = AnswerReader(None, hides_usage=False)
        reader.begin(200, headers)
        assert reader.is_stream and not reader.has_content
        reader.feed(b"\x1f\x8b", last=False)
        assert reader.has_content
