"""Decoding msgpack from outside: what it may contain, and how much memory it may take."""

import tracemalloc
from contextlib import suppress
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvatlas.errors import InvalidValue
from kvatlas.msgpack_input import MAX_OTHER_VALUES, unpack

LARGE = 1 << 20

json_like = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(json_like)
def test_what_was_packed_is_unpacked(value: Any) -> None:
    assert unpack(msgpack.packb(value), max_bytes=LARGE) == value


@given(st.binary(max_size=100))
def test_other_bytes_are_refused(payload: bytes) -> None:
    with suppress(InvalidValue):
        unpack(payload, max_bytes=LARGE, strict_map_key=False)


def array(element: bytes) -> bytes:
    count = LARGE // len(element)
    return b"\xdd" + count.to_bytes(4, "big") + element * count


@pytest.mark.parametrize("element", [b"\x90", b"\x80", b"\xe0", b"\xd0\x80"])
def test_a_megabyte_does_not_become_sixty(element: bytes) -> None:
    payload = array(element)
    tracemalloc.start()
    try:
        with pytest.raises(InvalidValue, match=f"more than {MAX_OTHER_VALUES} arrays"):
            unpack(payload, max_bytes=2 * LARGE)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < LARGE


@pytest.mark.parametrize("value", [list(range(300_000)), [1 << 40] * 70_000, [b"x" * 32] * 20_000], ids="abc")
def test_a_large_batch_of_an_engine_is_decoded(value: list[Any]) -> None:
    assert unpack(msgpack.packb(value), max_bytes=2 * LARGE) == value


def test_extension_types_are_refused() -> None:
    with pytest.raises(InvalidValue, match="extension type 5"):
        unpack(msgpack.packb(msgpack.ExtType(5, b"x")), max_bytes=LARGE)


def test_arrays_that_promise_more_than_there_is_take_no_memory() -> None:
    with pytest.raises(InvalidValue):
        unpack(b"\xdd\x7f\xff\xff\xff" * 1_000, max_bytes=LARGE)
