"""Host names of engines and their addresses, cached for a moment."""

import asyncio
import socket

RESOLVED_S = 2.0
"""How long a name's addresses are cached."""


class NameLookups:
    """Looks up names. Because each lookup takes a thread, requests to one name share a lookup, which continues if they
    are cancelled."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[float, list[str]]] = {}
        self._running: dict[str, asyncio.Task[list[str]]] = {}

    async def addresses(self, name: str) -> list[str]:
        """The addresses of a name, in the resolver's order. Raises OSError, or ValueError for text that is not a name."""
        known_at, known = self._known.get(name, (0.0, []))
        if known and asyncio.get_running_loop().time() - known_at <= RESOLVED_S:
            return known
        lookup = self._running.get(name)
        if lookup is None:
            lookup = self._running[name] = asyncio.create_task(self._look_up(name))
            lookup.add_done_callback(_take_failure)
        await asyncio.wait((lookup,))
        try:
            if lookup.cancelled():
                raise OSError(None, "the DNS lookup did not finish")
            return lookup.result()
        finally:
            del lookup  # see `wait_patiently`

    def close(self) -> None:
        """Abandon the running lookups."""
        for lookup in self._running.values():
            lookup.cancel()

    async def _look_up(self, name: str) -> list[str]:
        loop = asyncio.get_running_loop()
        try:
            infos = await loop.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        finally:
            del self._running[name]
        found, now = list(dict.fromkeys(str(info[4][0]) for info in infos)), loop.time()
        self._known = {other: entry for other, entry in self._known.items() if now - entry[0] <= RESOLVED_S}
        self._known[name] = now, found
        return found


def _take_failure(lookup: "asyncio.Task[list[str]]") -> None:
    """Retrieve a failure. If all waiting callers were cancelled, asyncio would otherwise log that it was never
    retrieved."""
    if not lookup.cancelled():
        lookup.exception()
