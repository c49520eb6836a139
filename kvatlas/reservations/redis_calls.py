"""Calls to a pool's functions in the store, for workers' reports and routers' bookings.

All keys of a pool are in one slot, and its functions take all of them (documented in `functions/_layout.lua`).
"""

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from kvatlas.store.connection import Store
from kvatlas.store.function_library import FunctionLibrary

POOL_LIBRARY = FunctionLibrary(
    "kvatlas_pool",
    Path(__file__).parent / "functions",
    (
        *(
            "_clock",
            "_layout",
            "_orders",
            "_queue",
            "_queue_turns",
            "_queue_charges",
            "_leases",
            "_pool",
            "_register",
            "_pair_choice",
        ),
        *("_prediction_matches", "_evaluation", "_look_alikes", "_held_blocks", "_lookup_rows", "_lookup", "_choice"),
    ),
)

_FORM = 2
"""The version in all keys except the first and the last. Routers and indexers with a different version book and report
separately."""

_PARTS = (
    "workers",
    *(
        f"{part}.{_FORM}"
        for part in (
            "load",
            "reservations",
            "booked",
            "owned",
            "routers",
            "predictions",
            "anchors",
            "predicted",
            "deadlines",
            "groups",
            "samples",
            "order_queued",
            "order_running",
            "order_kv",
            "order_mix",
            "sources",
            "queued_requests",
            "queue_numbers",
            "queue_counters",
            "queue_lines",
            "queue_deadlines",
            "queue_charges",
        )
    ),
    "rates",
)


@lru_cache(maxsize=1_024)
def pool_keys(pool_id: str) -> tuple[str, ...]:
    """The keys of a pool, in the order in which its functions take them; the first one holds its fleet records."""
    return tuple(f"kva:{{pool:{pool_id}}}:{part}" for part in _PARTS)


async def call_pool(
    store: Store, function: str, pool_id: str, args: Sequence[Any], *, keys: Sequence[str] | None = None
) -> Any:
    """Call `kvatlas_pool_<function>`; `keys`: given if it takes keys other than the pool's. Raises Unreachable."""
    return await POOL_LIBRARY.call(store, f"kvatlas_pool_{function}", keys or pool_keys(pool_id), args)


async def call_pool_ro(store: Store, function: str, pool_id: str, args: Sequence[Any]) -> Any:
    """Call `kvatlas_pool_<function>`, which does not write anything. Raises Unreachable."""
    return await POOL_LIBRARY.call_ro(store, f"kvatlas_pool_{function}", pool_keys(pool_id), args)
