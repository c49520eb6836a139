"""Redis or Valkey: connecting with clear errors, and calling server-side functions."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar
from urllib.parse import urlsplit

import redis.asyncio as redis
from redis.asyncio.cluster import ClusterNode, RedisCluster
from redis.asyncio.connection import SSLConnection, parse_url
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import (
    AskError,
    AuthenticationError,
    AuthorizationError,
    BusyLoadingError,
    ClusterError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisClusterException,
    RedisError,
    ResponseError,
    TryAgainError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from kvatlas.errors import AccessDenied, InvalidValue, Unreachable
from kvatlas.runtime.retry import retry_until_reachable
from kvatlas.store.access import CLUSTER_SCHEMES, RedisAccess
from kvatlas.store.read_replicas import ReadReplicas
from kvatlas.store.redis_connections import RedisConnections
from kvatlas.store.sentinel_url import SENTINEL_SCHEMES, SentinelUrl
from kvatlas.store.sentinels import watched_primary, with_context

T = TypeVar("T")

CALL_TIMEOUT_S = 5.0

_ONCE = Retry(NoBackoff(), 0)  # no hidden retries: the caller decides whether a second call is safe

UNREACHABLE = (
    RedisConnectionError,
    RedisTimeoutError,
    BusyLoadingError,
    ClusterError,
    RedisClusterException,
    ConnectionError,
    TimeoutError,
    OSError,
)
"""The errors that redis-py raises if the store does not answer; any other error is an answer."""


class Store:
    """Connections to one store, standalone or cluster; safe to share between tasks of one event loop."""

    def __init__(self, client: "redis.Redis | RedisCluster", access: RedisAccess) -> None:
        self.client: Any = client  # redis-py declares answers as unions of sync and async types
        self.is_cluster = isinstance(client, RedisCluster)
        self.url = access.url
        self.name = access.name
        self.attributes = access.attributes
        self.marked_s: dict[str, float] = {}
        """When each function library was last marked as used, by the monotonic clock."""
        self._nodes: dict[str, RedisConnections] = {}
        """The connections by node of a cluster; for a standalone store, there is one entry with an empty name."""
        self._replica_nodes: dict[str, RedisConnections] = {}
        self._replicas: ReadReplicas | None = None
        if access.read_replicas and isinstance(client, RedisCluster):
            self._replicas = ReadReplicas(client, self._connections_to_replica)

    async def fcall(self, function: str, keys: Sequence[str | bytes], args: Sequence[Any]) -> Any:
        """Call a server-side function. Raises Unreachable, or redis' ResponseError for an error that the server returns."""
        return (await self._call([("FCALL", function, len(keys), *keys, *args)], retry=False))[0]

    async def fcall_ro(self, function: str, keys: Sequence[str | bytes], args: Sequence[Any]) -> Any:
        """Call a read-only server-side function; see `fcall`."""
        return (await self._call([("FCALL_RO", function, len(keys), *keys, *args)], retry=True))[0]

    async def fcall_ro_many(self, function: str, calls: Sequence[tuple[Sequence[str], Sequence[Any]]]) -> list[Any]:
        """Make several read-only calls in one pipelined round trip (in a cluster, one to each node), which goes to read
        replicas if configured. Returns the answers in order."""
        commands = [("FCALL_RO", function, len(keys), *keys, *args) for keys, args in calls]
        if self._replicas is not None:
            return list(await asyncio.gather(*(self._call_replica(self._replicas, command) for command in commands)))
        return await self._call(commands, retry=True)

    async def ask_any(self, command: str) -> Any:
        """A primary's answer to a command that reads no key, sent over the same connections as function calls. Raises
        Unreachable."""
        connections = (
            self._connections_to_node(self.client.get_primaries()[0]) if self.is_cluster else self._connections()
        )
        try:
            return (await connections.call([(command,)], retry=True))[0]
        except UNREACHABLE as error:
            raise self.unreachable(error) from error

    async def ask(self, command: Awaitable[T]) -> T:
        """The answer to a command that is sent with `client`. Raises Unreachable."""
        try:
            return await command
        except UNREACHABLE as error:
            raise self.unreachable(error) from error

    def unreachable(self, error: BaseException) -> Unreachable:
        """Convert one of the UNREACHABLE errors to this package's own error, which names the store."""
        return Unreachable(f"{self.name}: {reason(error)}")

    async def _call(self, commands: Sequence[tuple[Any, ...]], *, retry: bool) -> list[Any]:
        try:
            if self.is_cluster:
                return list(await asyncio.gather(*(self._call_node(command, retry=retry) for command in commands)))
            return await self._connections().call(commands, retry=retry)
        except ReadOnlyError as error:
            # its role has changed: new connections may lead to the current primary
            for connections in self._nodes.values():
                connections.renew()
            await self.client.connection_pool.disconnect(inuse_connections=False)
            raise Unreachable(f"{self.name}: it is a read-only replica; expected a primary") from error
        except UNREACHABLE as error:
            raise self.unreachable(error) from error

    async def _call_replica(self, replicas: ReadReplicas, command: tuple[Any, ...]) -> Any:
        found = await replicas.call(command)
        return (await self._call([command], retry=True))[0] if found is None else found[0]

    async def _call_node(self, command: tuple[Any, ...], *, retry: bool) -> Any:
        """Call a function at the node that, as far as is known, holds the slot of its first key."""
        first_key = command[3]
        try:
            node = self.client.get_node_from_key(first_key)
            return (await self._connections_to_node(node).call([command], retry=retry))[0]
        except (AskError, TryAgainError, ClusterError, RedisClusterException, ReadOnlyError, RedisConnectionError):
            # the slot has moved, or its node is gone: redis-py finds and remembers the new one
            return await self._follow(command)

    async def _follow(self, command: tuple[Any, ...]) -> Any:
        try:
            return await self.client.execute_command(*command)
        except AttributeError as error:  # redis-py's reaction to an ASK with a node that it does not know yet
            raise RedisConnectionError("a slot is moving to an unknown server") from error

    def _connections_to_replica(self, node: ClusterNode) -> RedisConnections:
        options = {**node.connection_kwargs, "retry": _ONCE, "redis_connect_func": self.client.on_connect}
        connections = self._replica_nodes.get(node.name)
        if connections is None:
            connections = RedisConnections(lambda: node.connection_class(**options), CALL_TIMEOUT_S)
            self._replica_nodes[node.name] = connections
        return connections

    def _connections(self) -> RedisConnections:
        known = self._nodes.get("")
        return known or self._connections_to("", self.client.connection_pool.make_connection)

    def _connections_to_node(self, node: ClusterNode) -> RedisConnections:
        return self._connections_to(
            node.name, lambda: node.connection_class(**{**node.connection_kwargs, "retry": _ONCE})
        )

    def _connections_to(self, name: str, connect: Callable[[], Any]) -> RedisConnections:
        connections = self._nodes.get(name)
        if connections is None:
            connections = self._nodes[name] = RedisConnections(connect, CALL_TIMEOUT_S)
        return connections

    async def load_functions(self, code: str) -> None:
        """Load a function library on every primary, replacing an older one. Raises Unreachable, or OutOfMemoryError if the
        store has no room for a library that it does not have yet."""
        try:
            await self._on_primaries("FUNCTION LOAD", "REPLACE", code)
        except OutOfMemoryError:
            if not await self._has_functions(code):
                raise
        except UNREACHABLE as error:
            raise self.unreachable(error) from error

    async def list_libraries(self) -> list[str]:
        """The function libraries of all primaries. Raises Unreachable."""
        found = await self.ask(self._on_primaries("FUNCTION LIST"))
        servers = found.values() if isinstance(found, dict) else [found]
        return sorted({_library_name(library) for libraries in servers for library in libraries})

    async def delete_library(self, name: str) -> None:
        """Delete a function library on every primary that has it. Raises Unreachable."""
        try:
            await self.ask(self._on_primaries("FUNCTION DELETE", name))
        except ResponseError as error:
            if "Library not found" not in str(error):
                raise

    async def read_info(self, section: str) -> list[dict[str, Any]]:
        """A section of INFO from every primary. Raises Unreachable."""
        found = await self.ask(self._on_primaries("INFO", section))
        by_node = self.is_cluster and all(isinstance(one, dict) for one in found.values())
        return list(found.values()) if by_node else [found]

    async def read_config(self, name: str) -> dict[str, str]:
        """A setting of every primary that reports it, by node; for a standalone store, the name is empty. Raises Unreachable,
        or redis' ResponseError if the server hides its configuration."""
        found = await self.ask(self._on_primaries("CONFIG GET", name))
        answers = found if self.is_cluster and name not in found else {"": found}
        return {node: one[name] for node, one in answers.items() if isinstance(one, dict) and name in one}

    def _on_primaries(self, *command: str) -> Awaitable[Any]:
        where = {"target_nodes": RedisCluster.PRIMARIES} if self.is_cluster else {}
        answer: Awaitable[Any] = self.client.execute_command(*command, **where)
        return answer

    async def _has_functions(self, code: str) -> bool:
        """True if exactly this library is loaded. In a cluster this is unknown, because one answer does not cover every
        primary."""
        if self.is_cluster:
            return False
        name = code.partition("\n")[0].rpartition("name=")[2]
        found = await self.client.execute_command("FUNCTION LIST", "LIBRARYNAME", name, "WITHCODE")
        return any(code.encode() in library for library in found)

    async def close(self) -> None:
        for connections in (*self._nodes.values(), *self._replica_nodes.values()):
            await connections.close()
        await self.client.aclose()


async def open_store(
    access: RedisAccess | str, *, wait: bool = True, on_wait: Callable[[str], None] | None = None
) -> Store:
    """Open a store and wait for its first answer. `access` may also be just the URL.

    URLs: `redis://`, `rediss://`, `unix://`, `redis+cluster://` and `rediss+cluster://` (any nodes of a cluster, separated by
    commas), `redis+sentinel://` and `rediss+sentinel://` (as `SentinelUrl` describes). If `wait` is set, an unreachable store
    is tried again with back-off, and `on_wait` is called with a line for the user each time. Otherwise, Unreachable is raised
    immediately, with the address. Raises AccessDenied for wrong credentials or unusable certificate files, and InvalidValue for
    any other URL.
    """
    whole = RedisAccess(access) if isinstance(access, str) else access
    return await retry_until_reachable(lambda: _open(whole), wait=wait, on_wait=on_wait)


@asynccontextmanager
async def connected_store(
    access: RedisAccess | str, *, wait: bool = True, on_wait: Callable[[str], None] | None = None
) -> AsyncIterator[Store]:
    """Call `open_store` for a block, and close the store at the end of it."""
    store = await open_store(access, wait=wait, on_wait=on_wait)
    try:
        yield store
    finally:
        await store.close()


async def _open(access: RedisAccess) -> Store:
    store = Store(_client(access), access)
    try:
        await (_initialize(store.client) if store.is_cluster else store.client.ping())
        return store
    except (AuthenticationError, AuthorizationError, NoPermissionError) as error:
        await store.close()
        raise AccessDenied(f"{store.name}: {reason(error)}") from error
    except (RedisError, *UNREACHABLE) as error:
        await store.close()
        raise store.unreachable(error) from error


async def _initialize(client: RedisCluster) -> None:
    """Read the map of the cluster and its commands from any servers that answer. redis-py would insist on its first primary for
    the commands."""
    silent: set[str] = set()
    while True:
        try:
            await client.initialize()
            return
        except (RedisConnectionError, RedisTimeoutError):
            primaries = [node.name for node in client.get_primaries()]
            if not primaries or primaries[0] in silent:
                raise
            silent.add(primaries[0])
            client.nodes_manager.move_node_to_end_of_cached_nodes(primaries[0])


def reason(error: BaseException) -> str:
    """The error of a client library, as one line."""
    if isinstance(error, (RedisTimeoutError, TimeoutError)):
        return "no answer in time"
    if isinstance(error, AuthenticationError) and "HELLO must be called" in str(error):
        return "it requires credentials; put them into the URL"
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__


def _library_name(library: Any) -> str:
    """The name in an entry of FUNCTION LIST, which is a map or a flat list of names and values."""
    fields = library if isinstance(library, dict) else dict(zip(library[::2], library[1::2], strict=True))
    name: bytes = fields[b"library_name"]
    return name.decode()


def _client(access: RedisAccess) -> "redis.Redis | RedisCluster":
    try:
        # a driver would identify itself with CLIENT SETINFO, which Redis 7.0 does not know and our users may not call
        scheme, options = urlsplit(access.url).scheme, access.options() | {"driver_info": None}
        connections = _tls_connections(access)
        if scheme in CLUSTER_SCHEMES:
            first, *more = (url.replace("+cluster", "", 1) for url in access.urls)
            cluster = RedisCluster.from_url(
                first,
                startup_nodes=[_cluster_node(url) for url in more],
                require_full_coverage=False,  # a shard without a primary does not stop the others
                socket_timeout=CALL_TIMEOUT_S,
                socket_connect_timeout=2,
                **options,
            )
            if connections is not None:
                cluster.connection_kwargs["connection_class"] = connections
                for node in cluster.nodes_manager.startup_nodes.values():
                    node.connection_class = connections
            return cluster
        if scheme in SENTINEL_SCHEMES:
            return watched_primary(
                SentinelUrl.parse(access.url),
                access.tls_context(),
                options,
                socket_timeout=CALL_TIMEOUT_S,
                socket_connect_timeout=2,
                retry=_ONCE,
            )
        if scheme in ("redis", "rediss", "unix"):
            client = redis.Redis.from_url(
                access.url, socket_timeout=CALL_TIMEOUT_S, socket_connect_timeout=2, retry=_ONCE, **options
            )
            if connections is not None:
                client.connection_pool.connection_class = connections
            return client
    except InvalidValue:
        raise
    except (ValueError, TypeError, RedisClusterException) as error:  # the text may contain part of the password
        raise InvalidValue(f"{access.name}: the URL is malformed") from error
    except OSError as error:
        raise AccessDenied(f"{access.name}: {error.filename or 'certificate'}: {error.strerror}") from error
    raise InvalidValue(
        f"{access.name}; expected redis://, rediss://, unix://, redis+cluster:// or redis+sentinel:// (with TLS rediss+...)"
    )


def _tls_connections(access: RedisAccess) -> type[SSLConnection] | None:
    """Connections with the configured certificates; None if no certificates are configured."""
    context = access.tls_context()
    return None if context is None else with_context(SSLConnection, context)


def _cluster_node(url: str) -> ClusterNode:
    parts = parse_url(url)
    return ClusterNode(parts.get("host", "localhost"), parts.get("port", 6379))
