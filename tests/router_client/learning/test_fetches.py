"""The share that arrives is learned from fetches."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvatlas.blocks.tiers import Tier
from kvatlas.cost import EngineProfile
from kvatlas.request import SelectionResult
from router_client import Prompt, Usage
from router_client.learning.fetches import Fetches
from router_client.pricing.overlap import HeldPrefix, Run
from router_client.pricing.pool import Pool
from router_client.pricing.ranking import rank
from tests.router_client.pools import FETCH_BY, PEER, SCOPE, pool, worker

TOKENS = 10_000
HELD = 9_600
PROMPT = Prompt(SCOPE, TOKENS, tokens=range(TOKENS), output_tokens=10, fetch_by=FETCH_BY)
WORKERS = pool(worker("full", load={"queued_prefill_tokens": 100_000}, **PEER), worker("free", load={}, **PEER))


def best(fetches: Fetches) -> SelectionResult:
    """The worker that would fetch what the busy one holds."""
    prefix = HeldPrefix.of((Run(HELD, (Tier.HBM,)),))
    results = rank(PROMPT, Pool.of(WORKERS, None, EngineProfile(), fetches), {"full": prefix})
    return next(result for result in results if result.worker_id == "free")


def terms_of(result: SelectionResult) -> dict[str, int]:
    return {term.name: term.us for term in result.terms}


def test_what_never_arrives_is_soon_not_asked_for_and_is_tried_again_later() -> None:
    now = [0.0]
    fetches = Fetches(lambda: now[0])
    asked = 0
    while (result := best(fetches)).source is not None:
        asked += 1
        assert asked < 20
        fetches.record(SCOPE.pool_id, result, Usage(TOKENS, 1, 0))
    assert asked >= 1 and result.cached_tokens == 0 and "not_fetched" not in terms_of(result)
    now[0] += 600
    assert best(fetches).source == "full"


@given(st.lists(st.integers(0, TOKENS), max_size=40))
def test_what_does_not_arrive_is_paid_for_in_proportion(cached: list[int]) -> None:
    fetches = Fetches(lambda: 0.0)
    whole = best(fetches)
    for tokens in cached:
        fetches.record(SCOPE.pool_id, whole, Usage(TOKENS, 1, tokens))
        assert 0 < fetches.share(SCOPE.pool_id) <= 1
    priced = best(fetches)
    assert priced.score_us >= whole.score_us
    assert priced.score_us == sum(term.us for term in priced.terms)
    if priced.source is not None:
        share = fetches.share(SCOPE.pool_id)
        extra = terms_of(priced).get("not_fetched", 0)
        assert extra == pytest.approx((1 - share) * EngineProfile().rates.prefill_us(HELD, 0), rel=0.1)


@pytest.mark.parametrize("usage", [{"cached_tokens": None}, {"cached_tokens": HELD}])
def test_an_answer_that_says_nothing_or_has_it_all_changes_no_price(usage: dict[str, Any]) -> None:
    fetches = Fetches(lambda: 0.0)
    fetches.record(SCOPE.pool_id, best(fetches), Usage(TOKENS, 1, **usage))
    assert fetches.share(SCOPE.pool_id) == 1
