"""A request's hints in headers: strategy, priority, session, allow, deny; only if they are switched on."""

import pytest

from kvatlas.errors import InvalidValue
from kvatlas.store.connection import Store
from kvatlas_router.proxy.headers import for_engine
from router_client import Prompt, Selector, Strategy
from router_client.decision.request_hints import RequestHintHeaders
from router_client.pricing.surcharges import session_worker
from tests.router.proxy.engines import MODEL, running_fleet, running_proxy
from tests.router_client.pools import SCOPE

ASK = {"model": MODEL, "prompt": list(range(1, 200)), "max_tokens": 1}
ALL = {
    "strategy": "round-robin",
    "priority": "-3",
    "session": "s",
    "allow": "w1, w2",
    "deny": "w2",
}


def raw(**hints: str) -> list[tuple[bytes, bytes]]:
    return [(f"x-kvatlas-{name}".encode(), value.encode()) for name, value in hints.items()]


def test_headers_are_read_and_applied() -> None:
    hints = RequestHintHeaders.read([(b"x-other", b"1"), *raw(**ALL)])
    assert hints == RequestHintHeaders(Strategy.ROUND_ROBIN, -3, "s", ("w1", "w2"), ("w2",))
    prompt = hints.apply(Prompt.of_tokens(SCOPE, [1], select=Selector(unfit={"w3": "no such adapter"})))
    assert (prompt.strategy, prompt.session_id) == (Strategy.ROUND_ROBIN, "s")
    assert prompt.select == Selector(allow=("w1", "w2"), deny=("w2",), unfit={"w3": "no such adapter"})
    as_before = Prompt.of_tokens(SCOPE, [1], session_id="t")
    assert RequestHintHeaders.read(raw(strategy="", session="", allow=" , ")).apply(as_before) == as_before


@pytest.mark.parametrize(
    ("name", "value"),
    [("strategy", "fastest"), ("priority", "high"), ("priority", "9" * 40), ("allow", "w" * 9_000)],
)
def test_a_wrong_hint_is_named(name: str, value: str) -> None:
    with pytest.raises(InvalidValue, match=rf"^header x-kvatlas-{name} .*; expected [^\n]+$"):
        RequestHintHeaders.read(raw(**{name: value}))


def test_engines_get_no_hints() -> None:
    assert for_engine(raw(**ALL), {}, credentials=True) == [(b"accept-encoding", b"identity")]


@pytest.mark.anyio
async def test_hints_decide_only_where_they_are_switched_on(store: Store, valkey_url: str) -> None:
    async with running_fleet(store, {"w1": {}, "w2": {}, "w3": {}}) as fleet:
        await fleet.holds("w1", ASK["prompt"])  # type: ignore[arg-type]
        async with running_proxy(valkey_url, request_hints=True, session_ms=60_000, learn=False) as client:

            async def decision(**hints: str) -> str:
                headers = {f"X-KVAtlas-{name}": value for name, value in hints.items()}
                answer = await client.post("/v1/completions", json=ASK, headers=headers)
                assert answer.status_code == 200
                return answer.headers["x-kvatlas-decision"]

            assert (await decision()).startswith('"w1"')
            turns = [(await decision(Strategy="round-robin")).split(";")[0] for _ in range(3)]
            assert sorted(turns) == ['"w1"', '"w2"', '"w3"']
            assert "by=load" in await decision(Strategy="load")
            assert "by=cost" in await decision(Strategy="cost", Priority="5")
            assert (await decision(Allow="w2")).startswith('"w2"')
            assert not (await decision(Deny="w1")).startswith('"w1"')
            session = next(s for s in "abcdefgh" if session_worker(s, ["w1", "w2", "w3"]) == "w3")
            assert (await decision(Session=session)).startswith('"w3"')
            wrong = await client.post("/v1/completions", json=ASK, headers={"X-KVAtlas-Strategy": "best"})
            assert wrong.status_code == 400
            assert "expected one of cost, load, round_robin" in wrong.json()["error"]["message"]
        async with running_proxy(valkey_url, learn=False) as client:
            other = {
                **ASK,
                "prompt": list(range(1_000, 1_200)),
            }  # by now each worker is predicted to hold the first prompt
            await fleet.holds("w1", other["prompt"])  # type: ignore[arg-type]
            ignored = await client.post("/v1/completions", json=other, headers={"X-KVAtlas-Allow": "w2"})
            assert ignored.headers["x-kvatlas-decision"].startswith('"w1"')


@pytest.mark.anyio
async def test_a_body_of_hints_may_carry_an_engines_own_hashes_and_unknown_fields(
    store: Store, valkey_url: str
) -> None:
    async with running_fleet(store, {"w1": {}}), running_proxy(valkey_url) as client:
        body = {"block_hashes": ["a", 7], "block_tokens": 4, "session_id": "s", "colour": "red"}
        answer = (await client.post("/kvatlas/route", json=body)).json()
        assert (answer["worker"], answer["prompt_tokens"], answer["predicted_cached_tokens"]) == ("w1", 8, 0)
        assert answer["notes"] == ["unknown request field 'colour' ignored"]
        assert "colour" in answer["explanation"]
        wrong = await client.post("/kvatlas/route", json={**body, "chain": "own"})
        assert wrong.status_code == 400 and "expected 16 hex digits" in wrong.json()["error"]["message"]
