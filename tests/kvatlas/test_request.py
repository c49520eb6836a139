"""Request hints, their block keys, and the request's shape."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvatlas.blocks.hashing import extend_chain, unpack_hashes
from kvatlas.cost import Cost, CostTerm, TermKind
from kvatlas.errors import InvalidValue
from kvatlas.identity import Scope
from kvatlas.request import (
    DEFAULT_BLOCK_TOKENS,
    DEFAULT_DECODE_TOKENS,
    ROOT,
    Fallbacks,
    RequestHints,
    RequestShape,
    SelectionResult,
    Slo,
    hash_text,
)
from tests.kvatlas.strategies import hash_values, token_ids

FALLBACKS = Fallbacks(model_id="m", tokenizer_id="t")


def hints(**fields: Any) -> RequestHints:
    return RequestHints.parse({"request_id": "r1", **fields})


@given(st.lists(hash_values, max_size=12), st.none() | st.just("session-7"), st.none() | st.integers(1, 512))
def test_keys_chain_from_the_session_or_root(hashes: list[int], session: str | None, size: int | None) -> None:
    keys = hints(block_hashes=hashes, session_id=session, block_tokens=size).to_blocks(FALLBACKS)
    assert [key.block_hash for key in keys] == [hash_text(value) for value in hashes]
    assert [key.prefix_hash for key in keys] == [session or ROOT, *(key.block_hash for key in keys[:-1])][: len(keys)]
    assert [key.block_index for key in keys] == list(range(len(hashes)))
    assert {key.token_count for key in keys} <= {size or DEFAULT_BLOCK_TOKENS}


def test_worked_example() -> None:
    keys = hints(block_hashes=["aa", "bb", "cc"], session_id="s").to_blocks(FALLBACKS)
    assert [(k.prefix_hash, k.block_hash, k.block_index, k.token_count) for k in keys] == [
        ("s", "aa", 0, 64),
        ("aa", "bb", 1, 64),
        ("bb", "cc", 2, 64),
    ]
    assert {k.scope for k in keys} == {Scope("m", "t", None, "default")}


@given(st.lists(token_ids, max_size=100), st.integers(1, 20))
def test_token_ids_become_the_chain_of_their_full_blocks(tokens: list[int], size: int) -> None:
    request = hints(token_ids=tokens, block_tokens=size)
    chain = unpack_hashes(extend_chain(tokens, size))
    assert [key.block_hash for key in request.to_blocks(FALLBACKS)] == [hash_text(value) for value in chain]
    assert request.to_shape(FALLBACKS).input_tokens == len(tokens)


def test_the_block_size_is_that_of_the_hints_then_of_the_fallbacks_then_64() -> None:
    tokens = list(range(128))
    sizes = [
        [key.token_count for key in hints(token_ids=tokens, **given).to_blocks(fallbacks)]
        for given, fallbacks in [
            ({}, FALLBACKS),
            ({}, Fallbacks(model_id="m", block_tokens=32)),
            ({"block_tokens": 128}, Fallbacks(model_id="m", block_tokens=32)),
        ]
    ]
    assert sizes == [[64] * 2, [32] * 4, [128]]


def test_fallbacks_fill_in_missing_hints() -> None:
    known = Fallbacks("m", "t", "a", "x", estimated_decode_tokens=7)
    assert hints().scope(known) == Scope("m", "t", "a", "x")
    own = hints(model_id="m2", tokenizer_id="t2", adapter_id="a2", tenant_id="x2")
    assert own.scope(known) == Scope("m2", "t2", "a2", "x2")
    assert hints(token_ids=[]).to_shape(known).estimated_decode_tokens == 7
    assert hints(token_ids=[], estimated_decode_tokens=0).to_shape(known).estimated_decode_tokens == 0
    assert hints(token_ids=[]).to_shape(FALLBACKS).estimated_decode_tokens == DEFAULT_DECODE_TOKENS


def test_the_adapter_defaults_to_none() -> None:
    assert hints().scope(FALLBACKS).adapter_id is None


def test_the_tokenizer_defaults_to_the_model() -> None:
    assert hints(model_id="llama").scope(Fallbacks()) == Scope("llama", "llama")


def test_a_request_without_a_model_is_refused() -> None:
    with pytest.raises(InvalidValue, match="r1 names no model_id"):
        hints(token_ids=[1]).to_blocks(Fallbacks())


@pytest.mark.parametrize(("fields", "text"), [({}, "neither"), ({"token_ids": [], "block_hashes": []}, "both")])
def test_a_prompt_given_twice_or_not_at_all_is_refused(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidValue, match=f"gives {text} of token_ids and block_hashes"):
        hints(**fields).to_blocks(FALLBACKS)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("request_id", ""),
        ("token_ids", [1, 1 << 32]),
        ("token_ids", [-1]),
        ("token_ids", ["1"]),
        ("token_ids", [1.5]),
        ("token_ids", b"\x01\x00\x00\x00"),
        ("block_hashes", [1 << 64]),
        ("block_hashes", [-1]),
        ("block_hashes", [""]),
        ("block_hashes", [1.5]),
        ("block_tokens", 0),
        ("estimated_decode_tokens", -1),
        ("block_bytes", -1),
        ("session_id", ""),
        ("slo", {"ttft_ms": 0}),
        ("blok_tokens", 16),
    ],
)
def test_the_error_names_the_wrong_hint_in_one_line(field: str, value: object) -> None:
    with pytest.raises(InvalidValue, match=f"request field {field}") as caught:
        hints(**{field: value})
    assert len(str(caught.value).splitlines()) == 1


def test_a_request_without_an_id_is_refused() -> None:
    with pytest.raises(InvalidValue, match="request_id"):
        RequestHints.parse({"token_ids": [1]})


def test_the_default_slo() -> None:
    assert hints(token_ids=[1]).to_shape(FALLBACKS).slo == Slo(ttft_ms=800, tpot_ms=80) == Slo()


def test_input_tokens_count_the_partial_last_block() -> None:
    blocks = hints(block_hashes=[1, 2], block_tokens=16).to_blocks(FALLBACKS)
    assert RequestShape("r", Scope("m", "t"), blocks).input_tokens == 32
    assert hints(block_hashes=[1, 2], block_tokens=16, token_count=40).to_shape(FALLBACKS).input_tokens == 40
    with pytest.raises(InvalidValue, match="token_count 31; its blocks alone hold 32"):
        hints(block_hashes=[1, 2], block_tokens=16, token_count=31).to_shape(FALLBACKS)


def test_a_selection_result_explains_itself() -> None:
    kinds = (TermKind("prefill", "new tokens"), TermKind("queue", "queued tokens"))
    cost = Cost("quillcache", kinds, (900, 0), (20, 0), 900)
    result = SelectionResult("w1", 8, 6, 96, 80, cost, source="w2", transferred_tokens=16)
    text = result.explain()
    assert result.score_us == 900
    assert result.terms == (CostTerm("prefill", 900, 20, "new tokens"), CostTerm("queue", 0, 0, "queued tokens"))
    for part in ("w1", "6 of 8 blocks", "80 tokens usable", "16 more read from w2", "900 us = prefill 900 us"):
        assert part in text
    assert "queue" not in text
