"""Equal tokens under another model, tokenizer, adapter or tenant have overlap 0, in every index."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvatlas.identity import Scope
from kvatlas.index.protocol import ResidencyIndex
from router_client import Prompt, RouterClient, StaticFleet
from tests.router_client.pools import hold, pool, worker

pytestmark = pytest.mark.anyio

names = st.sampled_from(["a", "b"])
scopes = st.builds(
    Scope, names, names, st.sampled_from([None, "a", "None", "-"]), st.sampled_from(["default", "a", "None"])
)
TOKENS = list(range(160))


@given(held=st.lists(scopes, min_size=1, max_size=6), asked=scopes, depths=st.lists(st.integers(0, 10), min_size=6))
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
async def test_only_the_same_scope_overlaps(
    indexes: list[ResidencyIndex], held: list[Scope], asked: Scope, depths: list[int]
) -> None:
    # workers of the queried pool, whatever they hold: even then, other scopes' blocks do not count
    records = [worker(f"w{i}", scope=asked) for i in range(len(held))]
    expected = {r.endpoint.id: d if s == asked else 0 for r, s, d in zip(records, held, depths, strict=False)}
    for index in indexes:
        await index.clear()
        for record, scope, depth in zip(records, held, depths, strict=False):
            await hold(index, record, TOKENS, blocks=depth, scope=scope)
        router = RouterClient(index, StaticFleet(pool(*records)))
        prompt = Prompt.of_tokens(asked, TOKENS)
        assert {w.worker_id: w.resident_blocks for w in await router.overlap(prompt)} == expected
        assert {r.worker_id: r.overlap_blocks for r in await router.rank(prompt)} == expected


FIELDS = {"model_id": "m2", "tokenizer_id": "t2", "adapter_id": "a2", "tenant_id": "x2"}


@pytest.mark.parametrize("field", [*FIELDS, "no adapter"])
async def test_one_different_field_is_enough(indexes: list[ResidencyIndex], field: str) -> None:
    ours = Scope("m", "t", "a", "x")
    theirs = Scope("m", "t", None, "x") if field == "no adapter" else Scope(**{**_fields(ours), field: FIELDS[field]})
    for index in indexes:
        for holding, asking in [(ours, theirs), (theirs, ours)]:
            await index.clear()
            record = worker("w1", scope=asking)
            await hold(index, record, TOKENS, scope=holding)
            router = RouterClient(index, StaticFleet(pool(record)))
            assert [w.resident_blocks for w in await router.overlap(Prompt.of_tokens(asking, TOKENS))] == [0]
            same = RouterClient(index, StaticFleet(pool(worker("w1", scope=holding))))
            assert [w.resident_blocks for w in await same.overlap(Prompt.of_tokens(holding, TOKENS))] == [10]


def _fields(scope: Scope) -> dict[str, str]:
    assert scope.adapter_id is not None
    return {
        "model_id": scope.model_id,
        "tokenizer_id": scope.tokenizer_id,
        "adapter_id": scope.adapter_id,
        "tenant_id": scope.tenant_id,
    }
