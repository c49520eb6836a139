"""Routing policy: selection, roles, room, SLO, sessions, softening; and how results explain each of them."""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from math import exp
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvatlas.cost import QuillcacheProfile
from kvatlas.fleet.records import EngineKind, FleetRecord, Role
from kvatlas.index.memory.index import MemoryIndex
from kvatlas.request import DEFAULT_SLO, RequestHints, Slo
from kvatlas.reservations import MemoryReservations, RedisReservations, Reservations, WorkerReport
from kvatlas.store.connection import Store
from router_client import (
    Advice,
    BookingSettings,
    InvalidValue,
    LimitSettings,
    NoWorkers,
    Over,
    Prompt,
    RouterClient,
    RouterSettings,
    Selector,
    SloMode,
    StaticFleet,
)
from router_client.pricing.pool import Pool
from router_client.pricing.quote_desk import quote_candidates
from router_client.pricing.ranking import rank
from router_client.pricing.slo import advise
from router_client.pricing.surcharges import add_surcharges, session_worker
from tests.router_client.pools import SCOPE, pool, worker

pytestmark = pytest.mark.anyio

SETTINGS = RouterSettings(deadline_ms=None)


@pytest.fixture(params=["memory", "redis"])
def reservations(request: pytest.FixtureRequest, store: Store) -> Reservations:
    return MemoryReservations() if request.param == "memory" else RedisReservations(store)


def router(records: Mapping[str, FleetRecord], settings: RouterSettings = SETTINGS, **other: Any) -> RouterClient:
    return RouterClient(MemoryIndex(), StaticFleet(records), replace(settings, **other))


async def router_sharing(reservations: Reservations, records: Mapping[str, FleetRecord], **other: Any) -> RouterClient:
    """A router over shared reservations that know the workers' loads."""
    await reservations.report(SCOPE.pool_id, {id: WorkerReport.of(record, 0) for id, record in records.items()})
    return RouterClient(MemoryIndex(), StaticFleet(records), replace(SETTINGS, **other), reservations=reservations)


def prompt(number: int = 1, tokens: int = 100, **other: Any) -> Prompt:
    return Prompt.of_tokens(SCOPE, [number] * tokens, **other)


# ---------------------------------------------------------------- selection


names = st.sampled_from(["a", "b", "c", "d", "e"])
label_sets = st.dictionaries(st.sampled_from(["zone", "gpu"]), st.sampled_from(["1", "2"]))
selectors = st.builds(Selector, label_sets, st.none() | st.frozensets(names), st.frozensets(names))


@given(st.dictionaries(names, label_sets), selectors, selectors, st.frozensets(names))
def test_candidates_are_the_workers_that_every_selector_allows(
    labels: dict[str, dict[str, str]], first: Selector, second: Selector, avoid: frozenset[str]
) -> None:
    whole = Pool.of(pool(*(worker(id, labels=mine) for id, mine in labels.items())))
    left = whole.without(avoid).narrow(first.why_not).narrow(second.why_not)
    wanted = [
        id
        for id, mine in sorted(labels.items())
        if id not in avoid
        and all(one.labels.items() <= mine.items() for one in (first, second))
        and all(one.allow is None or id in one.allow for one in (first, second))
        and id not in {*first.deny, *second.deny}
    ]
    assert [candidate.id for candidate in left.candidates] == wanted
    assert [candidate.id for candidate in left.decoders] == wanted
    assert sorted([*left.left_out, *wanted]) == sorted(labels)


async def test_settings_and_requests_select_and_results_say_why_others_are_left_out() -> None:
    records = pool(
        worker("a", labels={"zone": "1"}),
        worker("b", labels={"zone": "2"}),
        worker("c", labels={"zone": "1"}),
        worker("d"),
    )
    client = router(records, select=Selector({"zone": "1"}))
    choice = await client.reserve(prompt(select=Selector(deny=["c"])), dry_run=True)
    assert choice.worker_id == "a"
    assert choice.ranking.left_out == {
        "b": "its label zone is 2; expected 1",
        "c": "it is on the deny list",
        "d": "its label zone is absent; expected 1",
    }
    assert choice.explain().splitlines()[-1].startswith("  left out: b (its label zone is 2; expected 1), c (it is on")
    assert choice.explanation()["left_out"] == choice.ranking.left_out
    with pytest.raises(
        NoWorkers, match=r"none of 4 workers can take the request: a \(it is not on the allow list\), b"
    ):
        await client.reserve(prompt(select=Selector(allow=["b"])))


def test_hints_carry_a_selector_and_a_session() -> None:
    hints = RequestHints.parse(
        {
            "request_id": "r",
            "token_ids": [1],
            "model_id": "m",
            "labels": {"zone": "1"},
            "allow": ["a"],
            "session_id": "s",
        }
    )
    made = Prompt.of_hints(hints)
    assert (made.session_id, made.select) == ("s", Selector({"zone": "1"}, ("a",), ()))
    assert Prompt.of_hints(RequestHints.parse({"request_id": "r", "token_ids": [1], "model_id": "m"})).select is None


# ---------------------------------------------------------------- roles


async def test_a_worker_of_one_role_gets_no_whole_requests() -> None:
    client = router(pool(worker("p", role=Role.PREFILL), worker("d", role=Role.DECODE), worker("w")))
    ranking = await client.rank(prompt())
    assert [result.worker_id for result in ranking] == ["w"]
    assert ranking.left_out == {"d": "it only computes answers", "p": "it only computes prompts"}


async def test_prefill_workers_get_whole_requests_if_no_other_worker_can() -> None:
    client = router(
        pool(
            worker("p", role=Role.PREFILL),
            worker("s", role=Role.PREFILL, kind=EngineKind.SGLANG),
            worker("d", role=Role.DECODE),
        )
    )
    ranking = await client.rank(prompt())
    assert [result.worker_id for result in ranking] == ["p"]
    assert ranking.left_out == {"d": "it only computes answers", "s": "it only computes prompts"}


# ---------------------------------------------------------------- room


def full_or_free(id: str, running: int = 0, active_blocks: int = 0, **load: Any) -> FleetRecord:
    metrics = {"total_request_slots": 4, "active_kv_blocks": active_blocks, "total_kv_blocks": 100}
    return worker(id, load={"running_decodes": running, "forward_pass": metrics, **load})


async def test_full_workers_get_nothing_while_others_have_room(reservations: Reservations) -> None:
    records = pool(
        full_or_free("a", running=4),
        full_or_free("b", active_blocks=97),
        full_or_free("c", running=3, queued_prefill_tokens=500),
    )
    client = await router_sharing(reservations, records)
    choice = await client.reserve(prompt())  # 100 tokens; b has 48 free
    assert choice.worker_id == "c"
    over = {result.worker_id: result.over for result in choice.ranking}
    assert over == {"c": Over(0), "a": Over.SLOTS, "b": Over.KV}
    assert choice.advice is Advice.GO
    last = await client.reserve(prompt(2))  # now c's slots are taken too: the cheapest of all wins
    assert last.advice is Advice.QUEUE
    assert all(result.over for result in last.ranking)
    assert "(no room: " in last.explain() and "advice: queue" in last.explain()
    assert last.explanation()["advice"] == "queue"


async def test_the_room_check_can_be_switched_off() -> None:
    records = pool(full_or_free("a", running=4), full_or_free("b", queued_prefill_tokens=1_400))
    assert (await router(records).reserve(prompt(), dry_run=True)).worker_id == "b"
    assert (await router(records, limits=LimitSettings(room=False)).reserve(prompt(), dry_run=True)).worker_id == "a"


async def test_room_counts_without_reservations_too() -> None:
    records = pool(full_or_free("a", running=4), full_or_free("b", queued_prefill_tokens=1_500))
    client = router(records, booking=BookingSettings(reservations=False))
    assert (await client.reserve(prompt(), dry_run=True)).worker_id == "b"
    assert [result.worker_id for result in await client.rank(prompt())] == ["b", "a"]


async def test_a_full_worker_is_chosen_rather_than_an_avoided_one() -> None:
    """A full worker may be chosen if no other is left; an avoided one never."""
    choice = await router(pool(full_or_free("a", running=9), full_or_free("b"))).reserve(
        prompt(), avoid=["b"], dry_run=True
    )
    assert choice.worker_id == "a"


# ---------------------------------------------------------------- SLO


def busy(*queued: int) -> dict[str, FleetRecord]:
    return pool(
        *(worker(chr(97 + i), load={"queued_prefill_tokens": n, "running_decodes": 0}) for i, n in enumerate(queued))
    )


def dear_decode(id: str) -> FleetRecord:
    """A worker whose first token comes at once, but whose answer takes longer."""
    return worker(id, load={"running_decodes": 200, "queued_prefill_tokens": 0})


async def test_the_slo_is_reported_priced_or_filtered(reservations: Reservations) -> None:
    """`a` has its first token after 904 ms, `b` after 4 ms, but takes 1,024 ms more for its answer, plus 320 ms for those it
    delays."""
    records = {**busy(22_500), **pool(dear_decode("b"))}
    asked = prompt(slo=Slo(ttft_ms=500))
    chosen = {}
    for name, limits in {
        "told": LimitSettings(),
        "cheap": LimitSettings(slo=SloMode.PENALTY, slo_factor=0.1),
        "dear": LimitSettings(slo=SloMode.PENALTY, slo_factor=2.0),
        "filter": LimitSettings(slo=SloMode.FILTER),
    }.items():
        client = await router_sharing(reservations, records, limits=limits)
        choice = await client.reserve(asked, dry_run=True)
        chosen[name] = choice.worker_id
        a = next(result for result in choice.ranking if result.worker_id == "a")
        assert a.over is Over.TTFT
        terms = {term.name: term for term in a.terms}
        assert ("slo" in terms) == (name in ("cheap", "dear"))
        assert sum(term.us for term in a.terms) == a.score_us
        if name == "dear":
            assert terms["slo"].us == pytest.approx(2 * (a.cost.ttft_us - 500_000), abs=4)  # type: ignore[operator]
        assert choice.advice is Advice.GO  # b meets it
    assert chosen == {"told": "a", "cheap": "a", "dear": "b", "filter": "b"}


@pytest.mark.parametrize("mode", SloMode)
async def test_if_all_workers_miss_the_slo_the_advice_says_so(mode: SloMode) -> None:
    limits = LimitSettings(slo=mode, shed_factor=3)
    for queued, advice, retry_s in [
        ((5_000, 0), Advice.GO, 1),
        ((40_000, 30_000), Advice.QUEUE, 1),
        ((90_000, 75_000), Advice.SHED, 3),
    ]:
        choice = await router(busy(*queued), limits=limits).reserve(prompt(), dry_run=True)
        assert (choice.advice, choice.retry_after_s) == (advice, retry_s)
        assert ("misses its SLO: ttft" in choice.explain()) == (advice is not Advice.GO)
        assert (await router(busy(*queued), limits=limits).rank(prompt())).advice is advice


async def test_under_a_profile_that_predicts_no_time_the_slo_is_not_checked() -> None:
    client = router(busy(90_000), profile=QuillcacheProfile(), limits=LimitSettings(slo=SloMode.FILTER))
    assert (await client.reserve(prompt(), dry_run=True)).advice is Advice.GO


def test_without_candidates_a_request_is_to_be_shed() -> None:
    assert advise((), DEFAULT_SLO, 4.0) is Advice.SHED


# ---------------------------------------------------------------- sessions


async def test_a_session_keeps_its_worker_on_every_router() -> None:
    records = pool(*(worker(f"w{i}") for i in range(8)))
    homes = {}
    for session in map(str, range(200)):
        chosen = set()
        for number in (1, 2, 3):
            client = router(records, session_us=50_000.0)  # a new router each time
            chosen.add((await client.reserve(prompt(number, session_id=session), dry_run=True)).worker_id)
        assert len(chosen) == 1
        homes[session] = chosen.pop()
    assert min(Counter(homes.values()).values()) > 8
    for gone in ("w3",):
        left = {id: record for id, record in records.items() if id != gone}
        for session, home in homes.items():
            moved = session_worker(session, sorted(left))
            assert (moved == home) == (home != gone)


async def test_leaving_a_sessions_worker_has_a_price() -> None:
    home = session_worker("s", ["a", "b"])
    other = "b" if home == "a" else "a"
    for queued, chosen in [(1_000, home), (1_300, other)]:  # 40,000 and 52,000 us
        records = pool(worker(home, load={"queued_prefill_tokens": queued}), worker(other, load={"running_decodes": 0}))
        choice = await router(records, session_us=50_000.0).reserve(prompt(session_id="s"), dry_run=True)
        assert choice.worker_id == chosen
        terms = {r.worker_id: {term.name: term.us for term in r.terms} for r in choice.ranking}
        assert "session" not in terms[home] and terms[other]["session"] == 50_000
    assert "session" not in str(
        (await router(records, session_us=50_000.0).reserve(prompt(), dry_run=True)).explanation()
    )


# ---------------------------------------------------------------- softening


def test_softened_choices_follow_the_costs() -> None:
    """Compared with the softmax that it implements."""
    records = busy(0, 1_000, 3_000, 20_000)
    whole, asked, temperature = Pool.of(records), prompt(), 0.05
    costs = {result.worker_id: result.score_us for result in rank(asked, whole, {})}
    drawn: Counter[str] = Counter()
    for number in range(3_000):
        fingerprint = number.to_bytes(8, "little")
        found = quote_candidates(asked, whole, {}, fingerprint=fingerprint)
        soft = add_surcharges(found, fingerprint, session_id=None, session_us=0.0, temperature=temperature)
        assert min(one.surcharge_us for one in soft) == 0
        drawn[min(soft, key=lambda one: costs[one.id] + one.surcharge_us).id] += 1
    unit = temperature * min(prospect.base_us for prospect in found)
    weights = {id: exp(-(cost - min(costs.values())) / unit) for id, cost in costs.items()}
    for id, weight in weights.items():
        assert drawn[id] / 3_000 == pytest.approx(weight / sum(weights.values()), abs=0.03)


async def test_softening_is_off_unless_asked_for_and_the_same_for_the_same_prompt() -> None:
    records = busy(0, 3_000)
    assert {(await router(records).reserve(prompt(n), dry_run=True)).worker_id for n in range(60)} == {"a"}
    chosen = []
    for seed in (1, 1, 2):
        client = router(records, temperature=0.2, seed=seed)
        chosen.append([(await client.reserve(prompt(n), dry_run=True)).worker_id for n in range(60)])
    assert chosen[0] == chosen[1] != chosen[2]
    assert set(chosen[0]) == {"a", "b"}
    choice = await router(records, temperature=0.2).reserve(prompt(), dry_run=True)
    assert sum("softening" in {term.name for term in result.terms} for result in choice.ranking) == 1


async def test_booked_choices_are_softened_as_they_are_ranked(reservations: Reservations) -> None:
    client = await router_sharing(reservations, busy(0, 1_000, 2_000), temperature=0.2, session_us=30_000.0)
    for number in range(30):
        asked = prompt(number, session_id="s")
        ranked = (await client.rank(asked)).results
        choice = await client.reserve(asked)
        assert choice.worker_id == ranked[0].worker_id
        assert [r.score_us for r in ranked] == sorted(r.score_us for r in ranked)
        await choice.done(status=0)


def test_a_negative_setting_is_one_clear_line() -> None:
    with pytest.raises(InvalidValue, match="temperature is -1; expected 0 or more"):
        RouterSettings(temperature=-1)
    with pytest.raises(InvalidValue, match="session_us is nan; expected 0 or more"):
        RouterSettings(session_us=float("nan"))


# ---------------------------------------------------------------- as data


async def test_an_explanation_is_plain_data_with_every_term() -> None:
    records = pool(worker("a", load={"running_decodes": 0}), worker("b", labels={"x": "y"}), worker("c"))
    client = router(records, temperature=0.1, session_us=9.0, limits=LimitSettings(slo=SloMode.PENALTY))
    choice = await client.reserve(prompt(tokens=40_000, session_id="s", select=Selector(deny=["b"])), dry_run=True)
    data = json.loads(json.dumps(choice.explanation()))
    assert data["worker"] == choice.worker_id and data["by"] == "cost"
    assert data["slo"] == {"ttft_ms": 800, "tpot_ms": 80}
    assert data["left_out"] == {"b": "it is on the deny list"}
    assert [one["worker"] for one in data["candidates"]] == [result.worker_id for result in choice.ranking]
    for one in data["candidates"]:
        assert sum(term["us"] for term in one["terms"]) == one["score_us"]
        assert one["over"] == ["ttft"]
    assert {"prefill", "slo", "softening", "session"} <= {t["name"] for one in data["candidates"] for t in one["terms"]}
    assert len(choice.explanation(most=1)["candidates"]) == 1
