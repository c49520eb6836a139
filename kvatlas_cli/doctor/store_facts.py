"""Facts about the servers of a store: a standalone server, or every primary of a cluster."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from redis.exceptions import NoPermissionError, ResponseError

from kvatlas.errors import Unreachable
from kvatlas.store.clock import store_time_us
from kvatlas.store.connection import UNREACHABLE, Store, reason

LEAST_ROUND_TRIPS = 3
MEASURE_MS = 400.0
NEAR_MS = 2.0
"""If a round trip is quicker than this, the store is near."""
POLICY, LISTPACK = "maxmemory-policy", "hash-max-listpack-entries"


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """One server. `info`: the sections of INFO as one map. `libraries`: the code of each function library, by name.

    `config` or `libraries` is None if our user may not read it. `primary=False`: the server is a replica.
    """

    name: str
    info: Mapping[str, Any]
    config: Mapping[str, str] | None
    libraries: Mapping[str, str] | None
    primary: bool = True


async def read_servers(store: Store) -> list[ServerFacts]:
    """Read every server of the store. Raises Unreachable."""
    try:
        if not store.is_cluster:
            return [await _read_server(store, "the store", {})]
        nodes = store.client.get_primaries()
        return [await _read_server(store, f"node {node.name}", {"target_nodes": node}) for node in nodes]
    except UNREACHABLE as error:
        raise Unreachable(f"{store.name}: {reason(error)}") from error


async def measure_round_trip(store: Store) -> float:
    """Measure a few round trips, and return the milliseconds of the fastest, since the others had to wait for a busy
    machine. Raises Unreachable."""
    await store_time_us(store)
    took_ms: list[float] = []
    while len(took_ms) < LEAST_ROUND_TRIPS or (sum(took_ms) < MEASURE_MS and took_ms[-1] > NEAR_MS):
        began_s = time.perf_counter()
        await store_time_us(store)
        took_ms.append((time.perf_counter() - began_s) * 1e3)
    return min(took_ms)


async def _read_server(store: Store, name: str, where: dict[str, Any]) -> ServerFacts:
    client = store.client
    info = await client.execute_command("INFO", **where)
    return ServerFacts(
        name,
        info,
        await _read_config(client, where),
        await _read_libraries(client, where),
        primary=str(info.get("role", "master")) == "master",
    )


async def _read_config(client: Any, where: dict[str, Any]) -> dict[str, str] | None:
    """The server's configuration; None if a managed service hides it."""
    found: dict[str, str] = {}
    try:
        for name in (POLICY, LISTPACK):
            found.update(_text_map(await client.execute_command("CONFIG GET", name, **where)))
    except (ResponseError, NoPermissionError):
        return None
    return found


async def _read_libraries(client: Any, where: dict[str, Any]) -> dict[str, str] | None:
    try:
        answer = await client.execute_command("FUNCTION LIST", "WITHCODE", "LIBRARYNAME", "kvatlas*", **where)
    except (ResponseError, NoPermissionError):
        return None
    found: dict[str, str] = {}
    for one in answer or []:
        library = _text_map(one)
        found[library["library_name"]] = library["library_code"]
    return found


def _text_map(answer: Any) -> dict[str, Any]:
    """Convert a map, or a flat list of names and values, to a map with bytes decoded to text."""
    pairs = answer.items() if isinstance(answer, Mapping) else zip(answer[::2], answer[1::2], strict=True)
    return {_decode(name): _decode(value) for name, value in pairs}


def _decode(value: Any) -> Any:
    return value.decode() if isinstance(value, bytes) else value
