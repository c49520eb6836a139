"""Routers' counts of answers in the store, in the slot of the pool that they are of, where `kvatlas doctor` reads them."""

from kvatlas.errors import Unreachable
from kvatlas.predictions.accuracy import AnswerReport
from kvatlas.reservations.redis_calls import call_pool
from kvatlas.store.connection import UNREACHABLE, Store, reason

KEEP_US = 60_000_000
"""A router that told nothing for so long is gone, and its counts with it."""
MOST_ROUTERS = 256


def answers_key(pool_id: str) -> str:
    return f"kva:{{pool:{pool_id}}}:answers"


async def tell_answers(store: Store, router_id: str, pool_id: str, report: AnswerReport) -> None:
    """Replace what this router told before. Raises Unreachable."""
    args = [router_id, KEEP_US, MOST_ROUTERS, report.pack()]
    await call_pool(store, "answered", pool_id, args, keys=[answers_key(pool_id)])


async def told_answers(store: Store, pool_id: str, now_us: int) -> dict[str, AnswerReport]:
    """Of the routers that live at this time of the store, by their id. Raises Unreachable, and InvalidValue for a report of
    an unknown form."""
    try:
        found = await store.client.hgetall(answers_key(pool_id))
    except UNREACHABLE as error:
        raise Unreachable(f"{store.name}: {reason(error)}") from error
    reports: dict[str, AnswerReport] = {}
    for router_id, value in found.items():
        ends_us, _, packed = value.partition(b" ")
        if int(ends_us) > now_us:
            reports[router_id.decode()] = AnswerReport.unpack(packed)
    return reports
