"""Calls to a pool's functions in the store: what is reported of its workers, and what routers book on them.

All of a pool is in one slot, and every function takes the same keys (`functions/_pool.lua` says what they hold).
"""

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from redis.exceptions import ResponseError

from kvatlas.store.connection import Store
from kvatlas.store.function_library import function_library

LIBRARY = "kvatlas_pool"
FUNCTIONS = Path(__file__).parent / "functions"
SHARED = ("_register", "_clock", "_pool", "_pairing", "_weigh")

_PARTS = (
    "workers",
    "load",
    "reservations",
    "booked",
    "routers",
    "predictions",
    "anchors",
    "predicted",
    "deadlines",
    "rates",
)


@lru_cache(maxsize=1_024)
def pool_keys(pool_id: str) -> tuple[str, ...]:
    """The keys of a pool, in the order in which its functions take them; the first has its fleet records."""
    return tuple(f"kva:{{pool:{pool_id}}}:{part}" for part in _PARTS)


def pool_library() -> str:
    """The code of the pool's functions."""
    return function_library(LIBRARY, FUNCTIONS, SHARED)


async def pool_call(
    store: Store, function: str, pool_id: str, args: Sequence[Any], *, keys: Sequence[str] | None = None
) -> Any:
    """Call `kvatlas_pool_<function>`; `keys` where it takes others than all of the pool's. Raises Unreachable."""
    return await _call(store, store.fcall, function, keys or pool_keys(pool_id), args)


async def pool_call_ro(
    store: Store, function: str, pool_id: str, args: Sequence[Any], *, keys: Sequence[str] | None = None
) -> Any:
    """Call a read-only `kvatlas_pool_<function>`; see `pool_call`. Raises Unreachable."""
    return await _call(store, store.fcall_ro, function, keys or pool_keys(pool_id), args)


async def _call(store: Store, call: Any, function: str, keys: Sequence[str], args: Sequence[Any]) -> Any:
    name = f"kvatlas_pool_{function}"
    try:
        return await call(name, keys, args)
    except ResponseError as error:
        if "Function not found" not in str(error):
            raise
        # the first call ever, or somebody flushed the functions: loading them again is always right
        await store.load_functions(pool_library())
        return await call(name, keys, args)
