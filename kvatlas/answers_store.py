"""Routers' counts of answers in the store, in the slot of the pool that they are of, where `kvatlas doctor` reads them."""

from kvatlas.answers import AnswerReport
from kvatlas.pool_calls import pool_call, pool_call_ro
from kvatlas.store import Store

KEEP_US = 60_000_000
"""A router that told nothing for so long is gone, and its counts with it."""
MOST_ROUTERS = 256


def answers_key(pool_id: str) -> str:
    return f"kva:{{pool:{pool_id}}}:answers"


async def tell_answers(store: Store, pool_id: str, router_id: str, report: AnswerReport) -> None:
    """Replace what this router told before. Raises Unreachable."""
    args = [router_id, KEEP_US, MOST_ROUTERS, report.pack()]
    await pool_call(store, "answered", pool_id, args, keys=[answers_key(pool_id)])


async def told_answers(store: Store, pool_id: str) -> dict[str, AnswerReport]:
    """Of the routers that live, by their id. Raises Unreachable, and InvalidValue for a report of an unknown form."""
    flat = await pool_call_ro(store, "answers", pool_id, [], keys=[answers_key(pool_id)])
    return {flat[i].decode(): AnswerReport.unpack(flat[i + 1]) for i in range(0, len(flat), 2)}
