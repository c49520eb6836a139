"""Counts of cached tokens are left out of answers, and nothing else, however a stream is cut."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvatlas_router.answers.cached_counts import events_without_cached_counts, without_cached_counts
from kvatlas_router.answers.event_stream import EventStream
from tests.router.answers.counted_answers import ANSWERS, CountedAnswer
from tests.router.answers.test_event_stream import FORMS, PLACES, cut, in_form

STREAMS = [answer for answer in ANSWERS if answer.streamed]
WHOLE = [answer for answer in ANSWERS if not answer.streamed]


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(STREAMS), PLACES, FORMS, st.booleans(), st.booleans())
def test_streams_lose_their_counts_and_nothing_else_wherever_they_are_cut(
    answer: CountedAnswer, places: list[int], form: tuple[bytes, bytes, bytes], hold: bool, by_bytes: bool
) -> None:
    counted, uncounted = (in_form(text, form) for text in (answer.counted, answer.uncounted))
    stream = EventStream(hide_usage=False, hold=hold, whole=True)
    pieces = [bytes([byte]) for byte in counted] if by_bytes else cut(counted, [place * 7 for place in places])
    passed = [*(stream.feed(piece) for piece in pieces), stream.end()]
    assert b"".join(map(events_without_cached_counts, passed)) == uncounted


@pytest.mark.parametrize("number", range(len(WHOLE)))
def test_whole_answers_lose_their_counts_and_nothing_else(number: int) -> None:
    answer = WHOLE[number]
    assert without_cached_counts(answer.counted) == answer.uncounted
    listed = b"[%s, %s]" % (answer.counted, answer.counted)  # for several prompts, as SGLang answers
    assert without_cached_counts(listed) == b"[%s, %s]" % (answer.uncounted, answer.uncounted)
    spaced = json.dumps(json.loads(answer.counted), indent=2).encode()
    assert json.loads(without_cached_counts(spaced)) == json.loads(answer.uncounted)


VALUES = st.recursive(
    st.none() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["usage", "cached_tokens", "choices", "message", "text", "a"]), inner, max_size=4
        )
    ),
    max_leaves=20,
)


def pruned(value: object, *, counts: bool = False) -> object:
    """Does with the parsed value what is done with the bytes; a member that becomes null is left out too."""
    if isinstance(value, list):
        return [pruned(one, counts=counts) for one in value]
    if not isinstance(value, dict):
        return value
    return {
        name: pruned(one, counts=counts or name == "usage")
        if counts or name in ("usage", "choices", "message")
        else one
        for name, one in value.items()
        if not (counts and "cache" in name)
    }


@settings(max_examples=60, deadline=None)
@given(VALUES, st.booleans(), st.booleans())
def test_counts_are_left_out_of_any_json(value: object, ascii: bool, spaced: bool) -> None:
    text = json.dumps(value, ensure_ascii=ascii, separators=None if spaced else (",", ":")).encode("utf-8", "replace")
    edited = without_cached_counts(text)
    assert pruned(json.loads(edited)) == pruned(json.loads(text))


def test_an_event_that_does_not_end_loses_its_counts() -> None:
    for open_ended, edited in (
        (b'{"usage":{"input_tokens":3,"cache_read_input_tokens":4', b'{"usage":{"input_tokens":7'),
        (b'{"usage":{"a":1,"cached_tokens_details":{"device":[3,', b'{"usage":{"a":1'),
        (b'{"usage":{"a":1,"cached_tokens":', b'{"usage":{"a":1'),
        (b'{"meta_info":{"cached_tokens":1', b'{"meta_info":{"cached_tokens":null'),
    ):
        assert events_without_cached_counts(b"data: " + open_ended) == b"data: " + edited


def test_an_event_with_broken_json_hides_nothing_from_the_next() -> None:
    counted, broken = b'data: {"usage":{"cached_tokens":4,"a":1}}\n\n', b'data: {"a":[{"b":"\n\n'
    assert events_without_cached_counts(broken + counted) == broken + b'data: {"usage":{"a":1}}\n\n'


def test_deep_nesting_and_long_strings_pass() -> None:
    deep = b'{"usage":' + b"[" * 50_000 + b'"cache' + b"]" * 50_000 + b"}"
    assert without_cached_counts(deep) == deep
    quotes = b'{"cache":"' + b'\\"' * 200_000
    assert without_cached_counts(quotes) == quotes
