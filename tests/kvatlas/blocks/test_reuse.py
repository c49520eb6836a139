"""How much of a resident prefix an engine reuses."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvatlas.blocks.reuse import ReuseRule, ReuseRules, default_rule
from kvatlas.errors import InvalidValue
from kvatlas.fleet.records import EngineEndpoint, EngineKind


def endpoint(kind: EngineKind, *, id: str = "w1", eagle: bool = False) -> EngineEndpoint:
    return EngineEndpoint(id=id, kind=kind, model_id="m", tokenizer_id="t", block_size=16, eagle=eagle)


@pytest.mark.parametrize(
    ("kind", "eagle", "resident", "prompt", "usable"),
    [
        # a whole block is recomputed if the hit would be the whole prompt
        (EngineKind.VLLM, False, 64, 64, 48),
        (EngineKind.VLLM, False, 64, 65, 64),
        (EngineKind.VLLM, False, 64, 70, 64),
        (EngineKind.VLLM, False, 48, 64, 48),
        (EngineKind.VLLM, False, 16, 16, 0),
        (EngineKind.VLLM, False, 0, 64, 0),
        (EngineKind.MOCK, False, 64, 64, 48),
        (EngineKind.TENSORRT_LLM, False, 64, 64, 48),
        # EAGLE drops the last matched block
        (EngineKind.VLLM, True, 48, 64, 32),
        (EngineKind.VLLM, True, 64, 64, 32),
        (EngineKind.VLLM, True, 16, 64, 0),
        (EngineKind.VLLM, True, 0, 64, 0),
        # pages, and pairs of tokens
        (EngineKind.SGLANG, False, 64, 64, 48),
        (EngineKind.SGLANG, False, 64, 65, 64),
        (EngineKind.SGLANG, True, 64, 65, 48),
        (EngineKind.SGLANG, True, 64, 66, 64),
        # not cut to blocks
        (EngineKind.LMCACHE, False, 64, 64, 63),
        (EngineKind.LMCACHE, False, 64, 65, 64),
    ],
)
def test_worked_examples_with_blocks_of_16(
    kind: EngineKind, eagle: bool, resident: int, prompt: int, usable: int
) -> None:
    assert default_rule(kind, eagle=eagle).usable_tokens(resident, prompt, 16) == usable


@given(st.sampled_from(EngineKind), st.booleans(), st.integers(0, 200), st.integers(0, 3_000), st.integers(1, 64))
def test_every_engine_recomputes_the_last_token(
    kind: EngineKind, eagle: bool, blocks: int, prompt: int, size: int
) -> None:
    rule = default_rule(kind, eagle=eagle)
    usable = rule.usable_tokens(blocks * size, prompt, size)
    assert 0 <= usable <= blocks * size
    assert usable <= max(0, prompt - 1)
    assert usable % size == 0 or not rule.block_aligned
    assert usable <= rule.usable_tokens((blocks + 1) * size, prompt, size)


def test_the_rule_is_that_of_the_worker_then_of_its_kind_then_the_default() -> None:
    own, kinds = ReuseRule(recomputed_tokens=9), ReuseRule(recomputed_tokens=5)
    rules = ReuseRules(by_worker={"w1": own}, by_kind={EngineKind.VLLM: kinds})
    assert rules.of(endpoint(EngineKind.VLLM)) == own
    assert rules.of(endpoint(EngineKind.VLLM, id="w2")) == kinds
    assert rules.of(endpoint(EngineKind.LMCACHE, id="w2")) == default_rule(EngineKind.LMCACHE)
    assert rules.of(endpoint(EngineKind.SGLANG, id="w2", eagle=True)) == default_rule(EngineKind.SGLANG, eagle=True)


@pytest.mark.parametrize("fields", [{"recomputed_tokens": -1}, {"dropped_blocks": -1}])
def test_negative_numbers_are_refused(fields: dict[str, int]) -> None:
    with pytest.raises(InvalidValue, match="negative"):
        ReuseRule(**fields)  # type: ignore[arg-type]
