"""Libraries of server-side functions: their code, and calls that load them again if the server lost them."""

from collections.abc import Awaitable, Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from redis.exceptions import NoPermissionError, ResponseError

from kvatlas.errors import Unreachable
from kvatlas.store.connection import Store

_MISSING = "Function not found"


class FunctionLibrary:
    """One library, made of a folder of `.lua` files: `shared` first, in this order (their locals serve the rest), then the
    others, one command a file.

    If the server does not have the function (it was never loaded, or flushed), a call loads the library, which is always
    right, and tries once more. With `load` False, or if this user may not load functions, it raises
    Unreachable instead: another process has to load it. All calls raise what `Store.fcall` raises.
    """

    def __init__(self, name: str, folder: Path, shared: Sequence[str]) -> None:
        self.name = name
        self._folder = folder
        self._shared = shared

    @cached_property
    def code(self) -> str:
        """What is loaded; it begins with the line that names the library."""
        commands = sorted(path.stem for path in self._folder.glob("*.lua") if path.stem not in self._shared)
        return "\n".join([f"#!lua name={self.name}", *map(self.source, (*self._shared, *commands))])

    def source(self, stem: str) -> str:
        """The text of one of its files."""
        return (self._folder / f"{stem}.lua").read_text()

    async def load(self, store: Store) -> None:
        """See `Store.load_functions`."""
        await store.load_functions(self.code)

    async def call(
        self, store: Store, function: str, keys: Sequence[str], args: Sequence[Any], *, load: bool = True
    ) -> Any:
        return await self._call(store, load, store.fcall, function, keys, args)

    async def call_ro(
        self, store: Store, function: str, keys: Sequence[str], args: Sequence[Any], *, load: bool = True
    ) -> Any:
        """`call` for a function that writes nothing."""
        return await self._call(store, load, store.fcall_ro, function, keys, args)

    async def call_ro_many(
        self, store: Store, function: str, calls: Sequence[tuple[Sequence[str], Sequence[Any]]], *, load: bool = True
    ) -> list[Any]:
        """Several (keys, args) of one function that writes nothing: see `Store.fcall_ro_many`."""
        answers: list[Any] = await self._call(store, load, store.fcall_ro_many, function, calls)
        return answers

    async def _call(self, store: Store, load: bool, call: Callable[..., Awaitable[Any]], *what: Any) -> Any:
        try:
            return await call(*what)
        except ResponseError as error:
            if _MISSING not in str(error):
                raise
        try:
            if not load:
                raise NoPermissionError
            await self.load(store)
        except NoPermissionError:
            line = f"{store.name}: its functions are gone; the next indexer that looks loads them again"
            raise Unreachable(line) from None
        return await call(*what)
