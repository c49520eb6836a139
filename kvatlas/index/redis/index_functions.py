"""The server-side functions of the index in one store."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvatlas.store.connection import Store
from kvatlas.store.function_library import FunctionLibrary

INDEX_LIBRARY = FunctionLibrary(
    "kvatlas_index",
    Path(__file__).parent / "functions",
    ("_register", "_slot", "_holders", "_blocks", "_marks", "_mark_lookup", "_fence", "_apply", "_worker_state"),
)


class IndexFunctions:
    """Calls functions by name (`functions/*.lua`); a call loads the library if the store has lost it.

    Raises Unreachable, or redis' ResponseError for an error that the server returns.
    """

    def __init__(self, store: Store) -> None:
        self._store = store

    async def call(self, function: str, keys: Sequence[str], args: Sequence[Any] = ()) -> Any:
        return await INDEX_LIBRARY.call(self._store, function, keys, args)

    async def call_ro(self, function: str, keys: Sequence[str], args: Sequence[Any] = ()) -> Any:
        """Call a function that does not write anything."""
        return await INDEX_LIBRARY.call_ro(self._store, function, keys, args)

    async def call_ro_many(self, function: str, calls: Sequence[tuple[Sequence[str], Sequence[Any]]]) -> list[Any]:
        """Several (keys, args) in one pipelined round trip. Returns the answers in order."""
        return await INDEX_LIBRARY.call_ro_many(self._store, function, calls)
