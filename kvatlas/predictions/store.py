"""Routers' counts of answers, in the slot of the pool. `kvatlas doctor` reads them."""

from typing import NamedTuple

from kvatlas.predictions.accuracy import AnswerReport
from kvatlas.reservations.redis_calls import call_pool
from kvatlas.store.connection import Store

KEEP_US = 60_000_000
"""A router that has not reported for this long is gone, and so are its counts."""
MAX_ROUTERS = 256


def answers_key(pool_id: str) -> str:
    return f"kva:{{pool:{pool_id}}}:answers"


async def write_answer_report(store: Store, router_id: str, pool_id: str, report: AnswerReport) -> None:
    """Replace this router's report. Raises Unreachable."""
    args = [router_id, KEEP_US, MAX_ROUTERS, report.pack()]
    await call_pool(store, "answered", pool_id, args, keys=[answers_key(pool_id)])


class StoredReport(NamedTuple):
    """A router's report, and when it was written (by the store's clock)."""

    report: AnswerReport
    written_us: int


async def read_stored_reports(store: Store, pool_id: str, now_us: int) -> dict[str, StoredReport]:
    """The reports that have not expired at `now_us` (the store's clock), by router id. Raises Unreachable, or InvalidValue for
    a report of an unknown form."""
    reports: dict[str, StoredReport] = {}
    for router_id, value in (await store.ask(store.client.hgetall(answers_key(pool_id)))).items():
        ends_us, _, packed = value.partition(b" ")
        if ends_us.isdigit() and int(ends_us) > now_us:
            reports[router_id.decode()] = StoredReport(AnswerReport.unpack(packed), int(ends_us) - KEEP_US)
    return reports
