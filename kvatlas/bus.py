"""NATS: connecting with clear errors, and the event stream."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal

from nats.aio.client import Client
from nats.errors import ConnectionClosedError, ConnectionReconnectingError, NoServersError, StaleConnectionError
from nats.errors import Error as NatsError
from nats.js.api import DiscardPolicy, RetentionPolicy, StorageType, StreamConfig
from nats.js.errors import APIError, NotFoundError, ServiceUnavailableError

from kvatlas.errors import AccessDenied, KvatlasError, Unreachable
from kvatlas.reaching import reached
from kvatlas.redact import without_password
from kvatlas.subjects import ALL_EVENTS, STREAM
from kvatlas.wire import MAX_MESSAGE_BYTES

_TEMPORARILY_UNAVAILABLE = 10008
"""JetStream's error code while its servers elect a leader."""


@dataclass(frozen=True, slots=True)
class StreamSettings:
    """How the event stream is kept. It is a change log: what it loses is told again by snapshots."""

    replicas: int = 1
    max_bytes: int = 1 << 30
    max_age_s: int = 30 * 60
    storage: Literal["file", "memory"] = "file"


@dataclass(frozen=True, slots=True)
class StreamInfo:
    """Where the event stream stands. `creation_us` tells one stream from its successor of the same name."""

    creation_us: int
    first_seq: int
    last_seq: int


async def connect_nats(
    url: str, *, name: str, wait: bool = True, on_wait: Callable[[str], None] | None = None
) -> Client:
    """A connected client that reconnects for ever.

    With `wait` an unreachable server is tried again with back-off, and `on_wait` gets the line for the user each time.
    Raises Unreachable, naming the address, at once without `wait`; AccessDenied for wrong credentials or a wrong URL.
    """

    async def attempt() -> Client:
        try:
            return await _connect_once(url, name)
        except (NatsError, OSError, TimeoutError, ValueError) as error:
            denied = isinstance(error, ValueError) or "authorization" in str(error).lower()
            kind = AccessDenied if denied else Unreachable
            raise kind(f"NATS at {without_password(url)}: {_reason(error)}") from error

    return await reached(attempt, wait=wait, on_wait=on_wait)


async def ensure_stream(client: Client, settings: StreamSettings) -> None:
    """The event stream exists afterwards; one that is there already is left as its operator made it.

    Raises Unreachable where the server does not answer now, KvatlasError where it refuses, or the stream of that name
    holds other subjects.
    """
    jetstream = client.jetstream()
    config = StreamConfig(
        name=STREAM,
        subjects=[ALL_EVENTS],
        retention=RetentionPolicy.LIMITS,
        max_age=settings.max_age_s,
        max_bytes=settings.max_bytes,
        discard=DiscardPolicy.OLD,
        num_replicas=settings.replicas,
        storage=StorageType(settings.storage),
        duplicate_window=0.1,
        max_msg_size=MAX_MESSAGE_BYTES + 64 * 1024,
    )
    try:
        try:
            found = await jetstream.stream_info(STREAM)
        except NotFoundError:
            await jetstream.add_stream(config)
            return
    except (APIError, NatsError, TimeoutError) as error:
        kind = Unreachable if _passes(error) else KvatlasError
        raise kind(f"stream {STREAM} can't be made: {_reason(error)}") from error
    if found.config.subjects != [ALL_EVENTS]:
        raise KvatlasError(f"stream {STREAM} holds subjects {found.config.subjects}; expected {[ALL_EVENTS]}")


async def stream_info(client: Client) -> StreamInfo:
    """Raises NotFoundError where there is no stream, other nats errors where the server does not answer."""
    # the raw answer: nats-py 2.16's StreamInfo drops the creation time's sub-second part on some versions
    reply = await client.request(f"$JS.API.STREAM.INFO.{STREAM}", b"", timeout=5)
    answer = json.loads(reply.data)
    if "error" in answer:
        APIError.from_error(answer["error"])  # raises the error that the code stands for
    state = answer["state"]
    return StreamInfo(microseconds_of(answer["created"]), int(state["first_seq"]), int(state["last_seq"]))


def microseconds_of(rfc3339: str) -> int:
    """Microseconds since 1970 of an RFC 3339 time with up to nine decimals."""
    whole, _, fraction = rfc3339.rstrip("Z").partition(".")
    seconds = int(datetime.fromisoformat(whole).replace(tzinfo=UTC).timestamp())
    return seconds * 1_000_000 + int((fraction + "000000")[:6])


class _Client(Client):
    """nats-py, without a fault of its version 2.16: an answer that comes after the flush it is for gave up ends the
    reader, and nothing is heard any more until the connection is found stale."""

    async def _process_pong(self) -> None:
        if self._pongs and self._pongs[0].done():
            self._pongs.pop(0)
            self._pongs_received += 1
            self._pings_outstanding = 0
        else:
            await super()._process_pong()


async def _connect_once(url: str, name: str) -> Client:
    client = _Client()
    failures: list[Exception] = []

    async def remember(error: Exception) -> None:
        """What nats-py met, until it is connected: afterwards it says only that no server is available."""
        failures.append(error)

    try:
        # reconnecting is switched on after the first connection: nats-py would otherwise try for ever in silence, and
        # even without it 60 times
        await client.connect(
            url,
            name=name,
            allow_reconnect=False,
            max_reconnect_attempts=1,
            reconnect_time_wait=0.25,  # type: ignore[arg-type]  # seconds; a float is taken
            connect_timeout=2,
            ping_interval=5,
            max_outstanding_pings=2,
            pending_size=8 * 1024 * 1024,
            error_cb=remember,
        )
    except NoServersError as error:
        raise (failures[-1] if failures else error) from None
    client._error_cb = _quiet  # there is no public way to change it
    client.options["allow_reconnect"] = True
    client.options["max_reconnect_attempts"] = -1
    return client


async def _quiet(_: Exception) -> None:
    """nats-py prints each connection error with its traceback by default; what we act on is the client's state."""


def _passes(error: BaseException) -> bool:
    """May the same request be answered a little later?"""
    if isinstance(error, APIError):
        return error.err_code == _TEMPORARILY_UNAVAILABLE
    return isinstance(error, (TimeoutError, ConnectionClosedError, ConnectionReconnectingError, StaleConnectionError))


def _reason(error: BaseException) -> str:
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, ServiceUnavailableError) and error.err_code is None:  # nobody listens on its API
        return "JetStream is not enabled there (nats-server -js)"
    if isinstance(error, APIError) and error.description:
        return error.description
    return str(error).removeprefix("nats: ") or type(error).__name__
