"""Digests of payloads, compared with a dictionary of them."""

import sys

from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_128_digest

from kvatlas_publishers.feed.payload_digests import DIGEST_BYTES, PayloadDigests


@given(st.integers(0, 1 << 63), st.integers(1, 8), st.lists(st.binary(max_size=3), max_size=40), st.integers(0, 40))
def test_the_last_ones_are_known(first: int, most: int, payloads: list[bytes], saved: int) -> None:
    digests = PayloadDigests(most)
    digests.add(7, b"of an earlier life")
    digests.clear()
    for number, payload in enumerate(payloads):
        digests.add(first + number, payload)
    known = {first + number: xxh3_128_digest(payload) for number, payload in enumerate(payloads)}
    kept = dict(list(known.items())[-most:])
    assert len(digests) == len(kept)
    assert {seq: digest for seq in range(first - 2, first + 45) if (digest := digests.get(seq)) is not None} == kept
    last_first, last = digests.last(saved)
    assert last == list(kept.values())[max(0, len(kept) - saved) :]
    assert not last or digests.get(last_first) == last[0]
    again = PayloadDigests(most, last_first, last)
    assert again.last(most) == ((last_first, last) if last else (last_first, []))


def test_a_payload_takes_the_bytes_of_its_digest() -> None:
    digests = PayloadDigests(1_000)
    for seq in range(10_000):
        digests.add(seq, b"x")
    assert sys.getsizeof(digests._packed) < 2 * 1_000 * DIGEST_BYTES
