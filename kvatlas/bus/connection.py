"""Connects to NATS, with errors that state the address and the reason, and ends subscriptions."""

import ssl
from collections.abc import Callable, Mapping
from typing import Any

import anyio
from nats.aio.client import Client
from nats.aio.subscription import Subscription
from nats.errors import BadSubscriptionError, ConnectionClosedError, ConnectionDrainingError, NoServersError
from nats.errors import Error as NatsError
from nats.js.errors import APIError, ServiceUnavailableError

from kvatlas.bus.access import NatsAccess
from kvatlas.errors import AccessDenied, Unreachable
from kvatlas.runtime.certificate_files import CERTIFICATE_EXPIRED, describe_verification
from kvatlas.runtime.retry import retry_until_reachable

UNSUBSCRIBE_S = 1.0


async def connect_nats(
    access: NatsAccess | str, *, name: str, wait: bool = True, on_wait: Callable[[str], None] | None = None
) -> Client:
    """Return a connected client that reconnects forever. `access` may also be just the URL.

    If `wait` is set, an unreachable server is tried again with back-off, and before each pause, `on_wait` is called with a line
    for the user. Otherwise, Unreachable is raised immediately, with the address. Raises AccessDenied for wrong credentials, a
    wrong URL or an unusable file.
    """
    access = NatsAccess(access) if isinstance(access, str) else access
    try:
        options = access.options()
    except ValueError as error:  # its message may contain part of the password
        raise AccessDenied(f"{access.name}: the URL is malformed") from error
    except OSError as error:
        raise AccessDenied(f"{access.name}: {error.filename or 'certificate'}: {error.strerror}") from error

    async def attempt() -> Client:
        try:
            return await _connect_once(options, name)
        except (NatsError, OSError, TimeoutError, ValueError) as error:
            expired = isinstance(error, ssl.SSLCertVerificationError) and error.verify_code == CERTIFICATE_EXPIRED
            denied = (isinstance(error, (ValueError, ssl.SSLError)) and not expired) or "authorization" in str(
                error
            ).lower()
            kind = AccessDenied if denied else Unreachable
            raise kind(f"{access.name}: {reason(error)}") from error

    return await retry_until_reachable(attempt, wait=wait, on_wait=on_wait)


class _Client(Client):
    """nats-py's client without two bugs of version 2.16. A PONG that arrives after its flush has timed out ends the reader, and
    then nothing is received until the connection is found to be stale. Closing the client while it reconnects writes pending
    data to the transport of the lost connection, which raises an error."""

    async def _process_pong(self) -> None:
        if self._pongs and self._pongs[0].done():
            self._pongs.pop(0)
            self._pongs_received += 1
            self._pings_outstanding = 0
        else:
            await super()._process_pong()

    async def _close(self, status: int, do_cbs: bool = True) -> None:
        if not self.is_connected:
            self._pending.clear()
            self._pending_data_size = 0
        await super()._close(status, do_cbs)


async def _connect_once(options: Mapping[str, Any], name: str) -> Client:
    client = _Client()
    failures: list[Exception] = []

    async def remember(error: Exception) -> None:
        """Keep nats-py's errors, because `connect` itself only reports that no server is available."""
        failures.append(error)

    try:
        # enable reconnection only after the first connection succeeded: otherwise nats-py would keep trying silently, 60 times
        # by default or forever
        await client.connect(
            **options,
            name=name,
            allow_reconnect=False,
            max_reconnect_attempts=1,
            reconnect_time_wait=0.25,  # type: ignore[arg-type]  # seconds; a float is accepted
            connect_timeout=2,
            ping_interval=5,
            max_outstanding_pings=2,
            pending_size=8 * 1024 * 1024,
            error_cb=remember,
        )
    except NoServersError as error:
        raise (failures[-1] if failures else error) from None
    finally:
        if not client.is_connected and client._transport is not None:
            # nats-py leaves the socket of a failed attempt to the garbage collector
            client._transport.close()  # type: ignore[no-untyped-call]
    client._error_cb = _quiet  # there is no public way to change it
    client.options["allow_reconnect"] = True
    client.options["max_reconnect_attempts"] = -1
    return client


async def _quiet(_: Exception) -> None:
    """Ignore a connection error: by default, nats-py prints it with its traceback, but we act on the client's state."""


async def unsubscribe(subscription: Subscription, client: Client) -> None:
    """End a subscription, even while being cancelled. Does nothing if the connection is closed or the server no longer knows
    the subscription."""
    if not client.is_connected:
        return
    with anyio.move_on_after(UNSUBSCRIBE_S, shield=True):
        try:
            await subscription.unsubscribe()
        except (BadSubscriptionError, ConnectionClosedError, ConnectionDrainingError):
            return


def reason(error: BaseException) -> str:
    """nats-py's error as one line."""
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, ssl.SSLCertVerificationError):  # this is a ValueError too
        return describe_verification(error)
    if isinstance(error, ValueError):
        return "the URL or the credentials are malformed"
    if isinstance(error, ServiceUnavailableError) and error.err_code is None:  # nothing answers on its API
        return "JetStream is not enabled there (nats-server -js)"
    if isinstance(error, APIError) and error.description:
        return error.description
    return str(error).removeprefix("nats: ") or type(error).__name__
