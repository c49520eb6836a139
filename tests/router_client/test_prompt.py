"""Prompts as token ids, ready hashes or hints; chains hashed chunk by chunk."""

from array import array
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvatlas.blocks.hashing import HASH_BYTES, extend_chain, unpack_hashes
from kvatlas.errors import InvalidValue
from kvatlas.request import Fallbacks, RequestHints, RequestShape
from router_client import Prompt, Slo
from router_client.prompt_chain import FIRST_BLOCKS, GROWTH, PromptChain
from tests.router_client.pools import SCOPE

TOKENS = list(range(100))


def all_chunks(chain: PromptChain) -> list[bytes]:
    chunks: list[bytes] = []
    while chunk := chain.chunk(len(chunks)):
        chunks.append(chunk)
    return chunks


@given(st.integers(0, FIRST_BLOCKS * (GROWTH + 3)), st.integers(1, 2))
def test_chunks_make_up_the_whole_chain(count: int, size: int) -> None:
    tokens = list(range(count))
    chunks = all_chunks(PromptChain(Prompt.of_tokens(SCOPE, tokens), size))
    assert b"".join(chunks) == extend_chain(tokens, size)
    lengths = [len(chunk) // HASH_BYTES for chunk in chunks]
    assert all(length == FIRST_BLOCKS * GROWTH**i for i, length in enumerate(lengths[:-1]))


@pytest.mark.parametrize(("blocks", "chunks"), [(1, 1), (256, 1), (257, 2), (512, 2), (2_304, 2), (8_192, 3)])
def test_a_long_hit_takes_few_lookups(blocks: int, chunks: int) -> None:
    assert len(all_chunks(PromptChain(Prompt.of_tokens(SCOPE, range(blocks)), 1))) == chunks


def test_only_the_chunks_that_are_read_are_hashed() -> None:
    chain = PromptChain(Prompt.of_tokens(SCOPE, range(100_000)), 16)
    assert chain.hashed_blocks == 0
    chain.chunk(0)
    chain.chunk(0)
    assert chain.hashed_blocks == FIRST_BLOCKS


def test_ready_hashes_are_one_chunk_of_their_block_size_alone() -> None:
    hashes = extend_chain(TOKENS, 16)
    prompt = Prompt.of_hashes(SCOPE, hashes, 16, input_tokens=100)
    assert all_chunks(PromptChain(prompt, 16)) == [hashes]
    assert all_chunks(PromptChain(prompt, 32)) == []
    assert Prompt.of_hashes(SCOPE, unpack_hashes(hashes), 16, input_tokens=100) == prompt
    assert Prompt.of_hashes(SCOPE, hashes, 16).input_tokens == 96


@pytest.mark.parametrize("tokens", [TOKENS, tuple(TOKENS), array("I", TOKENS), range(100)])
def test_tokens_may_be_any_sequence_of_integers(tokens: Any) -> None:
    prompt = Prompt.of_tokens(SCOPE, tokens)
    assert prompt.input_tokens == 100
    assert PromptChain(prompt, 16).chunk(0) == extend_chain(TOKENS, 16)


def test_extra_keys_go_into_the_chain() -> None:
    keys = [None, ["image", 0]]
    chain = PromptChain(Prompt.of_tokens(SCOPE, TOKENS, extra_keys=keys), 16)
    assert chain.chunk(0) == extend_chain(TOKENS, 16, None, keys)


@pytest.mark.parametrize("tokens", [b"\x01\x00\x00\x00", "1 2", bytearray(8), [1 << 32], [-1]])
def test_wrong_tokens_are_refused(tokens: Any) -> None:
    with pytest.raises(InvalidValue, match="token id"):
        Prompt.of_tokens(SCOPE, tokens)


@pytest.mark.parametrize(
    ("hashes", "size", "tokens", "text"),
    [
        (b"1234567", 16, None, "7 bytes"),
        ([1 << 64], 16, None, "2\\^64-1"),
        (b"", 0, None, "block size 0"),
        (bytes(16), 16, 31, "input_tokens 31; the blocks alone hold 32"),
    ],
)
def test_wrong_hashes_are_refused(hashes: Any, size: int, tokens: int | None, text: str) -> None:
    with pytest.raises(InvalidValue, match=text):
        Prompt.of_hashes(SCOPE, hashes, size, input_tokens=tokens)


FALLBACKS = Fallbacks(model_id="model", tokenizer_id="tokenizer", estimated_decode_tokens=9, block_bytes=77)


def test_hints_with_tokens_become_a_prompt() -> None:
    hints = RequestHints(request_id="r", token_ids=tuple(TOKENS), slo=Slo(ttft_ms=5))
    prompt = Prompt.of_hints(hints, FALLBACKS)
    assert (prompt.scope, prompt.input_tokens, prompt.tokens) == (SCOPE, 100, tuple(TOKENS))
    assert (prompt.output_tokens, prompt.block_bytes, prompt.slo, prompt.id) == (9, 77, Slo(ttft_ms=5), "r")
    assert PromptChain(prompt, 16).chunk(0) == extend_chain(TOKENS, 16)


@pytest.mark.parametrize("as_text", [False, True])
def test_hints_with_hashes_become_a_prompt(as_text: bool) -> None:
    hashes = unpack_hashes(extend_chain(TOKENS, 32))
    given = tuple(f"{value:016x}" for value in hashes) if as_text else tuple(hashes)
    hints = RequestHints.parse({"request_id": "r", "block_hashes": given, "block_tokens": 32, "token_count": 100})
    prompt = Prompt.of_hints(hints, FALLBACKS)
    assert (prompt.hashes, prompt.block_size, prompt.input_tokens) == (extend_chain(TOKENS, 32), 32, 100)


def test_a_request_shape_becomes_a_prompt() -> None:
    hints = RequestHints.parse({"request_id": "r", "token_ids": TOKENS, "block_tokens": 16})
    prompt = Prompt.of_shape(hints.to_shape(FALLBACKS))
    assert (prompt.hashes, prompt.block_size, prompt.input_tokens) == (extend_chain(TOKENS, 16), 16, 100)
    assert (prompt.id, prompt.output_tokens) == ("r", 9)


def test_a_shape_has_blocks_of_one_size() -> None:
    first, second = (
        RequestHints.parse({"request_id": "r", "token_ids": TOKENS, "block_tokens": size}).to_blocks(FALLBACKS)
        for size in (16, 32)
    )
    with pytest.raises(InvalidValue, match=r"blocks of \[16, 32\] tokens"):
        Prompt.of_shape(RequestShape("r", SCOPE, (first[0], second[0])))


@pytest.mark.parametrize("text", ["abc", "g" * 16, "+" + "f" * 15, " " + "f" * 15, "0x" + "f" * 14, "_".join("f" * 8)])
def test_hashes_that_no_index_holds_are_refused(text: str) -> None:
    hints = RequestHints.parse({"request_id": "r", "block_hashes": [text]})
    with pytest.raises(InvalidValue, match="16 hex digits"):
        Prompt.of_hints(hints, FALLBACKS)


@pytest.mark.parametrize("fields", [{}, {"token_ids": [1], "block_hashes": [1]}])
def test_a_prompt_is_given_exactly_once(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidValue, match="expected one"):
        Prompt.of_hints(RequestHints.parse({"request_id": "r", **fields}), FALLBACKS)
