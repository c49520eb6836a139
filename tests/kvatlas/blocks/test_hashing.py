"""The hash chain: check vectors, edges, refused tokens, laziness."""

import re
from array import array
from collections.abc import Sequence
from pathlib import Path

import msgpack
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvatlas.blocks.hashing import (
    HASH_BYTES,
    MAX_TOKEN_ID,
    SEED,
    extend_chain,
    lazy_chain,
    local_hash,
    pack_hashes,
    pack_tokens,
    thin,
    unpack_hashes,
)
from kvatlas.errors import InvalidValue
from tests.kvatlas.strategies import hash_values, token_ids

prompts = st.lists(token_ids, max_size=80)
sizes = st.integers(1, 17)


@given(prompts, sizes, st.integers(1, 4))
def test_with_lookahead_a_hash_covers_the_tokens_behind_its_block_and_no_others(
    tokens: list[int], size: int, lookahead: int
) -> None:
    def chain(prompt: list[int]) -> list[int]:
        return unpack_hashes(b"".join(lazy_chain(prompt, size, 3, lookahead_tokens=lookahead)))

    known = chain(tokens)
    assert len(known) == max(0, len(tokens) - lookahead) // size
    for at in range(len(tokens)):
        changed = chain([*tokens[:at], tokens[at] ^ 1, *tokens[at + 1 :]])
        same = [before == after for before, after in zip(known, changed, strict=True)]
        assert same == [(index + 1) * size + lookahead <= at for index in range(len(known))]


def chain_by_definition(tokens: Sequence[int], size: int, extra: Sequence[Sequence[object] | None] = ()) -> list[int]:
    """The chain by its definition, one block at a time."""
    chain: list[int] = []
    for index in range(len(tokens) // size):
        data = b"".join(token.to_bytes(4, "little") for token in tokens[index * size : (index + 1) * size])
        keys = extra[index] if index < len(extra) else None
        local = xxhash.xxh3_64_intdigest(data + (msgpack.packb(list(keys)) if keys else b""), 1337)
        if chain:
            both = chain[-1].to_bytes(8, "little") + local.to_bytes(8, "little")
            local = xxhash.xxh3_64_intdigest(both, 1337)
        chain.append(local)
    return chain


CONCEPTS = Path(__file__).parents[3] / "docs/concepts.md"


def test_check_vectors() -> None:
    first, second = 16863443419780771464, 2287610619914608821
    assert local_hash(range(1, 17)) == first
    assert local_hash(range(17, 33)) == second
    chain = unpack_hashes(extend_chain(list(range(1, 33)), 16))
    both = first.to_bytes(8, "little") + second.to_bytes(8, "little")
    assert chain == [first, xxhash.xxh3_64_intdigest(both, SEED)]
    assert unpack_hashes(extend_chain(range(1, 9), 4)) == [14643705804678351452, 4945711292740353085]
    assert local_hash(range(5, 9)) == 16777012769546811212


def test_the_documented_check_values_are_these() -> None:
    text = CONCEPTS.read_text()
    rows = re.findall(r"^\| (\d+) \| (?:then )?(\d+) to (\d+) \| (\d+) \| (\d*) \|$", text, re.MULTILINE)
    assert len(rows) == 4
    for size, first, last, local, sequence in (map(int, row) for row in rows):
        assert local_hash(range(first, last + 1)) == local
        assert sequence == unpack_hashes(extend_chain(range(1, last + 1), size))[-1]


@given(prompts, sizes)
def test_the_chain_equals_its_definition(tokens: list[int], size: int) -> None:
    assert unpack_hashes(extend_chain(tokens, size)) == chain_by_definition(tokens, size)


@given(prompts, sizes, st.lists(st.none() | st.lists(st.text(max_size=3) | st.integers(0, 9), max_size=2), max_size=90))
def test_the_chain_with_extra_keys_equals_its_definition(
    tokens: list[int], size: int, extra: list[list[object] | None]
) -> None:
    assert unpack_hashes(extend_chain(tokens, size, None, extra)) == chain_by_definition(tokens, size, extra)


@given(prompts, sizes, st.integers(0, 80))
def test_a_chain_can_be_extended_from_any_block(tokens: list[int], size: int, cut: int) -> None:
    whole = extend_chain(tokens, size)
    cut = min(cut, len(tokens) // size)
    if cut:
        parent = unpack_hashes(whole)[cut - 1]
        assert whole[: cut * HASH_BYTES] + extend_chain(tokens[cut * size :], size, parent) == whole


def test_no_tokens_have_no_hash() -> None:
    assert extend_chain([], 16) == b""
    assert list(lazy_chain([], 16, 8)) == []


@pytest.mark.parametrize("count", [1, 15])
def test_less_than_a_block_has_no_hash(count: int) -> None:
    assert extend_chain([7] * count, 16) == b""


@pytest.mark.parametrize("tail", [0, 1, 15])
def test_a_partial_last_block_changes_nothing(tail: int) -> None:
    assert extend_chain([*range(32), *[9] * tail], 16) == extend_chain(list(range(32)), 16)


def test_token_ids_up_to_32_bits_are_hashed() -> None:
    assert pack_tokens([0, MAX_TOKEN_ID]) == b"\x00" * 4 + b"\xff" * 4
    assert len(extend_chain([MAX_TOKEN_ID] * 16, 16)) == HASH_BYTES


@pytest.mark.parametrize("bad", [MAX_TOKEN_ID + 1, 1 << 64, -1, 1.5, "7", None])
@pytest.mark.parametrize("at", [0, 5, 17])
def test_the_error_names_an_invalid_token_id(bad: object, at: int) -> None:
    tokens: list[object] = [1] * 18
    tokens[at] = bad
    with pytest.raises(InvalidValue, match="token id") as caught:
        extend_chain(tokens, 16)  # type: ignore[arg-type]
    assert repr(bad) in str(caught.value)


def test_an_invalid_token_is_refused_even_without_a_full_block() -> None:
    with pytest.raises(InvalidValue, match="4294967296"):
        extend_chain([1 << 32], 16)


@pytest.mark.parametrize("tokens", [b"\x01\x00\x00\x00" * 16, bytearray(64), "1 2 3"])
def test_bytes_and_text_are_refused_as_token_ids(tokens: object) -> None:
    with pytest.raises(InvalidValue, match=type(tokens).__name__):
        extend_chain(tokens, 16)  # type: ignore[arg-type]
    with pytest.raises(InvalidValue, match=type(tokens).__name__):
        local_hash(tokens)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [tuple, lambda t: array("I", t), lambda t: array("Q", t), lambda t: array("i", t)])
def test_all_sequences_of_integers_hash_alike(kind: type) -> None:
    tokens = list(range(40))
    assert extend_chain(kind(tokens), 16) == extend_chain(tokens, 16)


@pytest.mark.parametrize("size", [0, -1])
def test_a_block_has_at_least_one_token(size: int) -> None:
    with pytest.raises(InvalidValue, match="block size"):
        extend_chain([1, 2], size)


def test_extra_keys_change_the_hash_of_their_block_and_of_all_after_it() -> None:
    tokens = list(range(48))
    plain = unpack_hashes(extend_chain(tokens, 16))
    image = unpack_hashes(extend_chain(tokens, 16, None, [None, ["image-1", 3]]))
    other = unpack_hashes(extend_chain(tokens, 16, None, [None, ["image-2", 3]]))
    assert plain[0] == image[0] == other[0]
    assert len({plain[1], image[1], other[1]}) == len({plain[2], image[2], other[2]}) == 3


@pytest.mark.parametrize("empty", [None, [], [None], [None, None, []]])
def test_a_block_without_extra_keys_is_plain(empty: Sequence[Sequence[object] | None] | None) -> None:
    tokens = list(range(48))
    assert extend_chain(tokens, 16, None, empty) == extend_chain(tokens, 16)


@given(prompts, sizes, st.integers(1, 9))
def test_a_lazy_chain_yields_the_whole_chain_in_chunks(tokens: list[int], size: int, chunk: int) -> None:
    chunks = list(lazy_chain(tokens, size, chunk))
    assert b"".join(chunks) == extend_chain(tokens, size)
    assert all(len(c) == chunk * HASH_BYTES for c in chunks[:-1])


def test_a_lazy_chain_hashes_no_further_than_requested() -> None:
    tokens: list[int] = [*range(16), 1 << 40]
    chunks = lazy_chain([*tokens, *[1] * 15], 16, 1)
    assert next(chunks) == extend_chain(tokens[:16], 16)
    with pytest.raises(InvalidValue):
        next(chunks)


@given(st.lists(hash_values))
def test_hashes_round_trip_through_their_packed_form(hashes: list[int]) -> None:
    packed = pack_hashes(hashes)
    assert packed == b"".join(h.to_bytes(8, "little") for h in hashes)
    assert unpack_hashes(packed) == hashes


@pytest.mark.parametrize("hashes", [[-1], [1 << 64], ["1"], [0.5]])
def test_only_64_bit_integers_can_be_packed(hashes: list[int]) -> None:
    with pytest.raises(InvalidValue):
        pack_hashes(hashes)


def test_packed_hashes_of_other_lengths_are_refused() -> None:
    with pytest.raises(InvalidValue, match="7 bytes"):
        unpack_hashes(b"1234567")


@given(st.lists(hash_values, max_size=40), st.integers(1, 6), st.integers(0, 20))
def test_thin_keeps_the_last_of_every_g_blocks(hashes: list[int], granularity: int, first: int) -> None:
    kept = [h for i, h in enumerate(hashes, first) if i % granularity == granularity - 1]
    assert unpack_hashes(thin(pack_hashes(hashes), granularity, first)) == kept
