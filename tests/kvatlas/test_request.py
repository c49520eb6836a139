"""Request hints, their block keys, and the request's shape."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvatlas.blocks.external_chain import ROOT, hash_text
from kvatlas.blocks.hashing import ExtraKeys, extend_chain, unpack_hashes
from kvatlas.cost import Cost, CostTerm, TermKind
from kvatlas.errors import InvalidValue
from kvatlas.identity import Scope
from kvatlas.request import (
    DEFAULT_BLOCK_TOKENS,
    Fallbacks,
    RequestHints,
    RequestShape,
    SelectionResult,
    Slo,
)
from kvatlas.validation import DEFAULT_DECODE_TOKENS
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
    with pytest.raises(InvalidValue, match=f"gives {text} "):
        hints(**fields).to_blocks(FALLBACKS)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("request_id", ""),
        *((name, "") for name in ("model_id", "tokenizer_id", "adapter_id", "tenant_id")),
        ("token_ids", [1, 1 << 32]),
        ("token_ids", [-1]),
        ("token_ids", ["1"]),
        ("token_ids", [1.5]),
        ("token_ids", b"\x01\x00\x00\x00"),
        ("block_hashes", [1 << 64]),
        ("block_hashes", [-(1 << 63) - 1]),
        ("block_hashes", [""]),
        ("block_hashes", [1.5]),
        ("block_tokens", 0),
        ("estimated_decode_tokens", -1),
        ("block_bytes", -1),
        ("session_id", ""),
        ("slo", {"ttft_ms": 0}),
        ("chain", "vllm"),
        ("chain", "external:"),
        ("media.0.offset", -1),
        ("media.0.id", ""),
    ],
)
def test_the_error_names_the_wrong_hint_in_one_line(field: str, value: object) -> None:
    name, _, part = field.partition(".0.")
    given = [{"id": "image", "offset": 0, "length": 1, part: value}] if part else value
    with pytest.raises(InvalidValue, match=f"request field {field}") as caught:
        hints(**{name: given})
    assert len(str(caught.value).splitlines()) == 1


def test_a_request_needs_no_id() -> None:
    shape = RequestHints.parse({"token_ids": [1]}).to_shape(FALLBACKS)
    assert (shape.id, shape.input_tokens) == (None, 1)
    with pytest.raises(InvalidValue, match="^request gives neither of"):
        RequestHints.parse({}).to_blocks(FALLBACKS)


def test_unknown_fields_are_ignored_and_named() -> None:
    told = hints(token_ids=[1], blok_tokens=16, a={"b": 1}, slo={"ttft_ms": 5, "e2e_ms": 9})
    assert told.ignored_fields == ["a", "blok_tokens", "slo.e2e_ms"]
    assert told.slo.ttft_ms == 5
    assert hints(token_ids=[1]).ignored_fields == []


def test_a_signed_hash_is_its_64_bits() -> None:
    keys = hints(block_hashes=[-1, (1 << 64) - 1, -(1 << 63)]).to_blocks(FALLBACKS)
    assert [key.block_hash for key in keys] == ["f" * 16, "f" * 16, "8" + "0" * 15]


def test_the_chain_that_hints_name_is_the_scopes() -> None:
    (key,) = hints(block_hashes=["a"], chain="external:x").to_blocks(FALLBACKS)
    assert key.scope == Scope("m", "t", chain="external:x")
    with pytest.raises(InvalidValue, match="expected block_hashes of that chain"):
        hints(token_ids=[1], chain="external:x").to_blocks(FALLBACKS)


def test_images_among_the_token_ids_are_in_the_blocks_hashes() -> None:
    media = [{"id": "image", "offset": 5, "length": 6}]
    one = hints(token_ids=list(range(16)), block_tokens=4, media=media)
    keys: list[ExtraKeys] = [None, [["image", 1]], [["image", -3]]]
    expected = extend_chain(range(16), 4, None, keys)
    assert [key.block_hash for key in one.to_blocks(FALLBACKS)] == [hash_text(one) for one in unpack_hashes(expected)]


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
