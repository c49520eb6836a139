"""A client for the primary that Sentinels watch."""

import asyncio
import ssl
from typing import Any

from redis.asyncio import Redis
from redis.asyncio.connection import SSLConnection
from redis.asyncio.sentinel import MasterNotFoundError, Sentinel, SentinelConnectionPool, SentinelManagedSSLConnection
from redis.exceptions import AuthenticationError, RedisError

from kvatlas.store.sentinel_url import SentinelUrl


def watched_primary(url: SentinelUrl, context: ssl.SSLContext | None, tls: dict[str, Any], **options: Any) -> Redis:
    """A client for whichever server is the primary: each new connection asks the Sentinels.

    `context`: used for all connections, instead of the system's CA certificates; `tls`: its files, in the form that redis-py
    takes; `options`: the options of every connection.
    """
    own = {"username": url.sentinel_username, "password": url.sentinel_password, "ssl": url.tls, **tls, **options}
    sentinel = _Sentinels(url.sentinels, sentinel_kwargs=own)  # type: ignore[no-untyped-call]
    pool = SentinelConnectionPool(  # type: ignore[no-untyped-call]
        url.service,
        sentinel,
        db=url.database,
        username=url.username,
        password=url.password,
        ssl=url.tls,
        **tls,
        **options,
    )
    if context is not None:
        pool.connection_class = with_context(SentinelManagedSSLConnection, context)
        for client in sentinel.sentinels:
            client.connection_pool.connection_class = with_context(SSLConnection, context)
    return _Watched(sentinel, pool)


class _Sentinels(Sentinel):
    """If none of the Sentinels knows a primary, reports in one line what each of them answered."""

    async def discover_master(self, service_name: str) -> tuple[str, int]:
        try:
            found: tuple[str, int] = await super().discover_master(service_name)
            return found
        except MasterNotFoundError:
            answers = await asyncio.gather(*(self._answer_of(one, service_name) for one in self.sentinels))
            raise MasterNotFoundError("; ".join(answers)) from None

    async def _answer_of(self, client: Redis, name: str) -> str:
        """One Sentinel's answer. Raises AuthenticationError if it refuses the login."""
        options = client.connection_pool.connection_kwargs
        place = f"Sentinel {options['host']}:{options['port']}"
        try:
            masters = await client.sentinel_masters()
        except AuthenticationError as error:
            raise AuthenticationError(
                f"{place}: {error}; its login is ?sentinel_username=...&sentinel_password=..."
            ) from None
        except (RedisError, OSError) as error:
            return f"{place}: {error}"
        return f"{place} {'says that its primary is down' if name in masters else f'watches no primary {name!r}'}"


class _Watched(Redis):
    """A client that also closes its connections to the Sentinels when it is closed."""

    def __init__(self, sentinel: Sentinel, pool: SentinelConnectionPool) -> None:
        super().__init__(connection_pool=pool)
        self.auto_close_connection_pool = True
        self._sentinel = sentinel

    async def aclose(self, close_connection_pool: bool | None = None) -> None:
        await super().aclose(close_connection_pool)
        await self._sentinel.aclose()


def with_context(kind: type[SSLConnection], context: ssl.SSLContext) -> type[SSLConnection]:
    """Connections that read renewed certificates again, whereas redis-py keeps the first ones."""

    class RenewedConnection(kind):  # type: ignore[valid-type, misc]
        def __init__(self, **options: Any) -> None:
            super().__init__(**options)
            self.ssl_context.context = context

    return RenewedConnection
