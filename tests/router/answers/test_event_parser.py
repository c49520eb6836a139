"""Server-sent events are parsed as the standard says, however they are cut into pieces."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvatlas_router.answers.event_parser import MOST_DATA_BYTES, Event, EventParser, may_begin_event
from tests.router.answers.naive_events import naive_events

FIELDS = (b"data", b"data: ", b"data:", b"event: error", b"event", b"id: 7", b"retry: 10", b": ping", b":")
OTHERS = (b" ", b"x", b"{}", b"[DONE]", b"\xef\xbb\xbf", b"\xc3", b"\xbc")
ENDS = (b"\n", b"\r", b"\r\n", b"\n\n", b"\r\r", b"\r\n\r\n", b"\n\r\n")
WORDS = st.sampled_from([*FIELDS, *OTHERS, *ENDS])
TEXTS = st.lists(WORDS, max_size=30).map(b"".join)
PLACES = st.lists(st.integers(0, 200), max_size=20)


def cut(text: bytes, places: list[int]) -> list[bytes]:
    at = sorted({0, len(text), *(place % (len(text) + 1) for place in places)})
    return [text[a:b] for a, b in pairwise(at)]


def parse(parts: list[bytes]) -> list[Event]:
    parser = EventParser()
    events = [event for part in parts for event in parser.feed(part)]
    last = parser.end()
    return events if last is None else [*events, last]


@given(TEXTS, PLACES)
def test_pieces_give_the_events_of_the_whole_text(text: bytes, places: list[int]) -> None:
    assert [(event.type, event.data) for event in parse(cut(text, places))] == naive_events(text)


@given(TEXTS)
def test_an_event_is_there_with_the_first_byte_of_its_blank_line(text: bytes) -> None:
    """A CR ends it, without waiting for an LF that may follow."""
    parser, seen = EventParser(), 0
    for at in range(len(text)):
        seen += len(parser.feed(text[at : at + 1]))
        assert seen == len(naive_events(text[: at + 1] + b"x")) - 1


def test_an_event_of_any_length_ends_though_only_its_beginning_is_kept() -> None:
    text = b"data: " + b"a" * MOST_DATA_BYTES
    first, second = parse([text, b"b" * 100, b"\ndata: c\n", b"\ndata: d\n\n"])
    assert first.cut and first.data is not None and first.data.startswith(b"aaa") and b"b" not in first.data
    assert (second.cut, second.data) == (False, b"d")


@pytest.mark.parametrize(
    "text", [b"", b"d", b"data", b"data: x", b"\xef\xbb\xbfdata", b": ping", b"event: a\nda", b"\r\nid: 1"]
)
def test_the_beginning_of_an_event_is_recognised(text: bytes) -> None:
    assert may_begin_event(text)


@pytest.mark.parametrize("text", [b"{", b"Hello", b'{"choices": [', b"<html>", b"dada"])
def test_what_is_no_event_is_recognised(text: bytes) -> None:
    assert not may_begin_event(text)
