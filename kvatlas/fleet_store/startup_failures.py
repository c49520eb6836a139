"""Why indexers can't start, in their own words. Without these reports, only the consequences would be visible.

kva:{fleet}:trouble   HASH  member id -> "<us of the store's clock> <line>"
"""

from kvatlas.store.clock import store_time_us
from kvatlas.store.connection import Store

TROUBLE = "kva:{fleet}:trouble"
KEEP_US = 60_000_000
"""Maximum age of a report. An indexer that is still waiting repeats its report before that."""


async def report_trouble(store: Store, member_id: str, line: str) -> None:
    """Record why this indexer can't start. Raises Unreachable."""
    await store.ask(store.client.hset(TROUBLE, member_id, f"{await store_time_us(store)} {line}"))
    await store.ask(store.client.pexpire(TROUBLE, KEEP_US // 1_000))


async def clear_trouble(store: Store, member_id: str) -> None:
    """Remove the report of an indexer that has started. Raises Unreachable."""
    await store.ask(store.client.hdel(TROUBLE, member_id))


async def read_trouble(store: Store, now_us: int) -> dict[str, str]:
    """The line of each indexer that can't start, as of this time by the store's clock. Raises Unreachable."""
    found: dict[str, str] = {}
    for member_id, value in (await store.ask(store.client.hgetall(TROUBLE))).items():
        at_us, _, line = value.decode(errors="replace").partition(" ")
        if at_us.isdigit() and now_us - int(at_us) < KEEP_US:
            found[member_id.decode(errors="replace")] = line
    return found
