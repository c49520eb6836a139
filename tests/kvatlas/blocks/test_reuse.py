"""The part of a resident prefix that an engine reuses."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvatlas.blocks.reuse import CacheReading, ReuseRule, ReuseRules, default_rule
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


@pytest.mark.parametrize(
    ("rule", "resident", "prompt", "usable"),
    [
        # one group: a block of what may be reused is dropped
        (ReuseRule(dropped_blocks=1), 96, 64, 32),
        (ReuseRule(dropped_blocks=1), 48, 100, 32),
        # several groups: a block of what is resident is dropped, so a longer resident prefix costs nothing
        (ReuseRule(dropped_blocks=1, drops_resident=True), 96, 64, 48),
        (ReuseRule(dropped_blocks=1, drops_resident=True), 48, 100, 32),
        (ReuseRule(dropped_blocks=1, drops_resident=True), 0, 100, 0),
        # blocks of 16 next to a group with blocks of 64
        (ReuseRule(alignment_tokens=64), 112, 200, 64),
        (ReuseRule(alignment_tokens=64), 128, 200, 128),
        (ReuseRule(alignment_tokens=64), 128, 128, 64),
        # ... and the smaller blocks drop one: first the drop, then the cut
        (ReuseRule(alignment_tokens=64, dropped_blocks=1, drops_resident=True), 128, 200, 64),
        (ReuseRule(alignment_tokens=64, dropped_blocks=1, drops_resident=True), 144, 200, 128),
    ],
)
def test_drop_and_cut_follow_the_engines_order(rule: ReuseRule, resident: int, prompt: int, usable: int) -> None:
    assert rule.usable_tokens(resident, prompt, 16) == usable


@pytest.mark.parametrize(
    ("reading", "kind", "readable"),
    [
        (CacheReading(), EngineKind.VLLM, None),
        (CacheReading(prompt_logprobs=True), EngineKind.VLLM, 0),
        (CacheReading(prompt_logprobs=True, skip=False), EngineKind.VLLM, None),
        (CacheReading(skip=True), EngineKind.MOCK, 0),
        (CacheReading(skip=True), EngineKind.SGLANG, None),
        (CacheReading(logprob_start_len=40), EngineKind.SGLANG, 40),
        (CacheReading(logprob_start_len=0), EngineKind.SGLANG, 0),
        (CacheReading(logprob_start_len=40), EngineKind.VLLM, None),
        (CacheReading(prompt_logprobs=True), EngineKind.LMCACHE, None),
    ],
)
def test_a_request_limits_what_its_engine_may_read(
    reading: CacheReading, kind: EngineKind, readable: int | None
) -> None:
    assert reading.readable_tokens(kind) == readable


def test_tokens_that_may_not_be_read_are_not_usable() -> None:
    assert default_rule(EngineKind.VLLM).usable_tokens(64, 100, 16, readable_tokens=0) == 0
    assert default_rule(EngineKind.SGLANG).usable_tokens(64, 100, 16, readable_tokens=40) == 32
    assert default_rule(EngineKind.SGLANG).usable_tokens(64, 50, 16, readable_tokens=60) == 48


@pytest.mark.parametrize("fields", [{"recomputed_tokens": -1}, {"dropped_blocks": -1}, {"alignment_tokens": -1}])
def test_negative_numbers_are_refused(fields: dict[str, int]) -> None:
    with pytest.raises(InvalidValue, match="negative"):
        ReuseRule(**fields)  # type: ignore[arg-type]
