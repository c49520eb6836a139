"""Tells the store what a router counted of answers, so that `kvatlas doctor` sees what each router sees."""

import logging

import anyio

from kvatlas.answers_store import tell_answers
from kvatlas.store import Store
from router_client.fail_open import FAILING
from router_client.tokens.comparison import TokenComparison

EVERY_S = 2.0

_log = logging.getLogger("router_client")


async def keep_telling(store: Store, router_id: str, comparison: TokenComparison) -> None:
    """Tell every pool's counts, also unchanged ones (they are kept for a minute), until cancelled."""
    reachable = True
    while True:
        try:
            for pool_id, report in comparison.reports().items():
                await tell_answers(store, pool_id, router_id, report)
            reachable = True
        except FAILING as error:
            if reachable:
                _log.warning("counts of answers are not told: %s", error)
            reachable = False
        await anyio.sleep(EVERY_S)
