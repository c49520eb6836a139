"""The fast reader and writer agree with the standard library's."""

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvatlas.runtime.json_text import decode, decode_strictly, encode

scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
values = st.recursive(scalars, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=10)


def as_read(value: Any) -> str:
    return json.dumps(value)


@given(values, st.sampled_from(["utf-8", "utf-16", "utf-8-sig", "utf-32-le"]), st.booleans())
def test_every_text_is_read_as_by_the_standard_library(value: Any, encoding: str, ascii_only: bool) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only)
    assert as_read(decode(text.encode(encoding))) == as_read(json.loads(text))


@given(st.integers(min_value=10**17) | st.integers(max_value=-(10**17)))
def test_long_integers_stay_integers(value: int) -> None:
    assert decode(b'{"a": [%d]}' % value) == {"a": [value]}


@given(values)
def test_what_is_written_is_read_back(value: Any) -> None:
    assert as_read(json.loads(encode(value))) == as_read(json.loads(json.dumps(value)))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 2**70, "\ud800", None])
def test_what_only_the_standard_library_writes_is_written_alike(value: Any) -> None:
    assert encode({"a": [value, 1]}) == json.dumps({"a": [value, 1]}, separators=(",", ":")).encode()


@pytest.mark.parametrize("text", [b"[NaN]", b'["\\ud800"]', b"\xef\xbb\xbf{}", b"[%d]" % 2**64, b"[1e400]"])
def test_what_readers_disagree_on_is_not_read_strictly(text: bytes) -> None:
    assert decode_strictly(text) is None
    assert repr(decode(text)) == repr(json.loads(text))


@pytest.mark.parametrize("text", [b"", b"{", b'{"a": 01}', b'["\xff"]', b"{} x"])
def test_what_is_no_json_is_refused(text: bytes) -> None:
    with pytest.raises(ValueError, match="."):
        decode(text)
