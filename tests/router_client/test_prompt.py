"""Prompts as token ids, precomputed hashes or hints; chains hashed chunk by chunk."""

from array import array
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvatlas.blocks.external_chain import external_chain
from kvatlas.blocks.hashing import HASH_BYTES, ExtraKeys, extend_chain, pack_hashes, unpack_hashes
from kvatlas.blocks.media import MediaItem
from kvatlas.errors import InvalidValue
from kvatlas.request import Fallbacks, RequestHints, RequestShape
from router_client import Prompt, Slo
from router_client.chain_cache import ChainCache
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


@pytest.mark.parametrize(("blocks", "chunks"), [(1, 1), (1_024, 1), (1_025, 2), (9_216, 2), (9_217, 3)])
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
def test_text_that_is_no_hash_of_the_own_chain_is_an_engines_own_hash(text: str) -> None:
    prompt = Prompt.of_hints(RequestHints.parse({"block_hashes": [text]}), FALLBACKS)
    assert (prompt.scope.chain, prompt.hashes) == ("external:default", external_chain([text]))
    with pytest.raises(InvalidValue, match="of chain own; expected 16 hex digits"):
        Prompt.of_hints(RequestHints.parse({"block_hashes": [text], "chain": "own"}), FALLBACKS)


def test_hashes_of_64_bits_are_sequence_hashes_unless_another_chain_is_named() -> None:
    own = Prompt.of_hints(RequestHints.parse({"block_hashes": [7]}), FALLBACKS)
    assert (own.scope.chain, own.hashes) == ("own", pack_hashes([7]))
    named = Prompt.of_hints(RequestHints.parse({"block_hashes": [7], "chain": "external:x"}), FALLBACKS)
    assert (named.scope.chain, named.hashes) == ("external:x", external_chain(["0000000000000007"]))


def test_external_hashes_of_a_session_begin_there() -> None:
    hints = RequestHints.parse({"block_hashes": ["a", "b"], "session_id": "s"})
    prompt = Prompt.of_hints(hints, FALLBACKS)
    assert prompt.hashes == external_chain(["a", "b"], "s") != external_chain(["a", "b"])
    assert (prompt.block_size, prompt.input_tokens) == (64, 128)


def test_ignored_fields_are_notes() -> None:
    prompt = Prompt.of_hints(RequestHints.parse({"token_ids": [1], "blok_tokens": 4}), FALLBACKS)
    assert prompt.notes == ("unknown request field 'blok_tokens' ignored",)


@pytest.mark.parametrize("fields", [{}, {"token_ids": [1], "block_hashes": [1]}])
def test_a_prompt_is_given_exactly_once(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidValue, match="expected one"):
        Prompt.of_hints(RequestHints.parse({"request_id": "r", **fields}), FALLBACKS)


def test_images_are_in_the_chain_of_each_block_size_behind_them_the_salt() -> None:
    items = [MediaItem("a", 20, 40)]
    keys: dict[int, list[ExtraKeys]] = {
        16: [["salt"], [["a", 4]], [["a", -12]], [["a", -28]]],
        32: [[["a", 20], "salt"], [["a", -12]]],
    }
    for size, expected in keys.items():
        prompt = Prompt.of_tokens(SCOPE, TOKENS, media=items, extra_keys=(("salt",),), memory=ChainCache())
        assert PromptChain(prompt, size).all_hashes() == extend_chain(TOKENS, size, None, expected)
    ahead = PromptChain(Prompt.of_tokens(SCOPE, TOKENS, media=items), 16, lookahead_tokens=4)
    plain = PromptChain(Prompt.of_tokens(SCOPE, TOKENS), 16, lookahead_tokens=4)
    assert ahead.all_hashes()[:8] == plain.all_hashes()[:8] and ahead.all_hashes()[8:16] != plain.all_hashes()[8:16]


def test_hints_tell_images_too() -> None:
    media = [{"id": "a", "offset": 20, "length": 40}]
    hints = RequestHints.parse({"request_id": "r", "model_id": "m", "token_ids": TOKENS, "media": media})
    prompt = Prompt.of_hints(hints)
    assert prompt.media == (MediaItem("a", 20, 40),)
    assert (
        PromptChain(prompt, 16).all_hashes()
        == PromptChain(Prompt.of_tokens(SCOPE, TOKENS, media=prompt.media), 16).all_hashes()
    )


def test_a_prompt_of_which_the_start_is_known_is_as_long_as_it_is_said_to_be() -> None:
    prompt = Prompt.of_tokens(SCOPE, TOKENS, input_tokens=500)
    assert (prompt.input_tokens, prompt.is_whole) == (500, False)
    assert PromptChain(prompt, 16).all_hashes() == extend_chain(TOKENS, 16)
    assert Prompt.of_tokens(SCOPE, TOKENS).is_whole and not Prompt.of_hashes(SCOPE, b"", 16).is_whole
