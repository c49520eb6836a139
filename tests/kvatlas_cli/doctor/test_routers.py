"""Routers' counts of answers: the faults found in them, and their expiry."""

import pytest

from kvatlas.identity import pool_id
from kvatlas.index.redis.index import open_redis_index
from kvatlas.predictions.accuracy import AnswerCounts, AnswerReport
from kvatlas.predictions.condition import RouterCondition
from kvatlas.predictions.store import answers_key, read_stored_reports, write_answer_report
from kvatlas.reservations.redis_calls import call_pool
from kvatlas.store.connection import connected_store
from kvatlas_cli.doctor import Level
from kvatlas_cli.doctor.routers import describe_slow_store, judge_conditions
from kvatlas_router.gateway.counters import GatewayCounters
from tests.eventually import until
from tests.kvatlas_cli.doctor.installation import MODEL, Installation, fleet_record, now_us

pytestmark = pytest.mark.anyio

POOL = pool_id(MODEL, MODEL)


async def test_what_routers_find_wrong_is_a_finding(installation: Installation) -> None:
    await open_redis_index(installation.store, writer=True)
    await installation.write_records(fleet_record("w"))
    await write_answer_report(
        installation.store, "good", POOL, AnswerReport(counts=AnswerCounts(prompts_equal=3, cached_equal=3))
    )
    wrong = AnswerReport(
        counts=AnswerCounts(prompts_equal=1, prompts_differ=2), example="12 tokens where it counted 10"
    )
    await write_answer_report(installation.store, "bad", POOL, wrong)
    untold = AnswerReport(counts=AnswerCounts(prompts_equal=3, cached_untold=3))
    await write_answer_report(installation.store, "untold", POOL, untold)
    bad, good, silent = await installation.findings("routers.answers")
    assert silent.level is Level.WARNING and silent.line.endswith("engines don't report cached tokens")
    assert "--enable-prompt-tokens-details" in silent.advice
    assert good.level is Level.OK and "router good" in good.line and "100.0%" in good.line
    assert bad.level is Level.WARNING and "2 of 3 prompts differ" in bad.line and "--tokenizer engine" in bad.advice


async def test_a_stalled_worker_is_named_with_the_routers_that_found_it(installation: Installation) -> None:
    await open_redis_index(installation.store, writer=True)
    await installation.write_records(fleet_record("w"), fleet_record("v"))
    for router_id, stalled in (("r1", ("w",)), ("r2", ("w",)), ("r3", ())):
        await write_answer_report(installation.store, router_id, POOL, AnswerReport(stalled=stalled))
    (found,) = await installation.findings("routers.progress")
    assert found.level is Level.ERROR and "worker w is stalled" in found.line and "router r1, r2" in found.line


def test_a_request_that_is_lost_counts_once_however_often_it_was_tried() -> None:
    """A router tries a request several times, and may find a worker in the end. A library on its own has only its choices."""
    for requests, refused, no_workers, line in (
        (100, 2, 15, "no engine took 2 requests"),
        (100, 0, 15, ""),
        (0, 0, 3, "no engine took 3 requests"),
    ):
        condition = RouterCondition(sent_us=1, requests=requests, refused=refused, no_workers=no_workers)
        lost = [one.line for one in judge_conditions({"r": condition}) if one.check == "routers.refused"]
        assert lost == ([f"router r: {line} of the last minute"] if line else [])
    counters = GatewayCounters(by_prompt=3, invalid=5, refused=1, late=1, gone=1)
    assert counters.read_ends() == (5, 2, 1), "a client's own mistakes are no loss"


async def test_a_router_with_one_tenant_says_so(installation: Installation) -> None:
    await open_redis_index(installation.store, writer=True)
    await installation.write_records(fleet_record("w"))
    for router_id, proves in (("library", None), ("open", False), ("proving", True)):
        condition = RouterCondition(sent_us=now_us(), proves_tenants=proves)
        await write_answer_report(installation.store, router_id, POOL, AnswerReport(condition=condition))
    open_, proving = await installation.findings("routers.proof")
    assert open_.level is Level.INFO and open_.line.startswith(
        "router open: every client that reaches it belongs to the tenant of --tenant-id"
    )
    assert "--clients-file" in open_.advice
    assert proving.level is Level.OK and "router proving: each request proves its tenant" in proving.line
    condition = RouterCondition(sent_us=now_us(), proves_tenants=True, limits_shared=False)
    await write_answer_report(installation.store, "alone", POOL, AnswerReport(condition=condition))
    (alone,) = await installation.findings("routers.limits")
    assert alone.level is Level.WARNING and "router alone: clients' limits per minute are not shared" in alone.line


async def test_a_router_that_is_far_from_the_store_says_what_that_costs(installation: Installation) -> None:
    await open_redis_index(installation.store, writer=True)
    await installation.write_records(fleet_record("w"))
    far = RouterCondition(
        sent_us=now_us(), choices=90, fell_open=9, without_index=8, store_us=80_200, store_is_far=True
    )
    await write_answer_report(installation.store, "far", POOL, AnswerReport(condition=far))
    line = (await installation.problem("routers.distance")).line
    assert "router far is 80 ms away" in line and "8 of 90 choices" in line and "bookings 80 ms late" in line
    late = far.model_copy(update={"without_index": 80, "fell_open": 80, "sent_us": now_us() + 86_400_000_000})
    await write_answer_report(installation.store, "far", POOL, AnswerReport(condition=late))
    assert describe_slow_store({"far": far}) is None and "80 of 90 choices" in (
        describe_slow_store({"far": late}) or ""
    )
    assert "router far +1.0 d" in (await installation.problem("clocks")).line


async def test_counts_of_routers_are_bounded_and_expire(fresh_store: str) -> None:
    async with connected_store(fresh_store, wait=False) as store:
        for number, keep_us in ((1, 40_000_000), (2, 20_000_000), (3, 60_000_000)):
            report = AnswerReport(counts=AnswerCounts(prompts_equal=number))
            args = [f"r{number}", keep_us, 2, report.pack()]
            await call_pool(store, "answered", POOL, args, keys=[answers_key(POOL)])
        reports = await read_stored_reports(store, POOL, now_us())
        assert {router_id: one.report.counts.prompts_equal for router_id, one in reports.items()} == {"r1": 1, "r3": 3}
        assert list(await read_stored_reports(store, POOL, now_us() + 50_000_000)) == ["r3"]
        args = ["r4", 1, 9, AnswerReport().pack()]
        await call_pool(store, "answered", POOL, args, keys=[answers_key(POOL)])

        async def have_expired() -> bool:
            return not await store.client.exists(answers_key(POOL))

        await until(have_expired, what="the counts have expired")
