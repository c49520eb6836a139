"""The event stream: its configuration and its position."""

import json
import logging
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Literal

from nats.aio.client import Client
from nats.errors import ConnectionClosedError, ConnectionReconnectingError, StaleConnectionError
from nats.errors import Error as NatsError
from nats.js.api import DiscardPolicy, RetentionPolicy, StorageType, StreamConfig
from nats.js.errors import APIError, NotFoundError

from kvatlas.bus.connection import reason
from kvatlas.bus.subjects import ALL_EVENTS, STREAM
from kvatlas.bus.wire import MAX_MESSAGE_BYTES
from kvatlas.errors import KvatlasError, Unreachable

_TEMPORARILY_UNAVAILABLE = 10008
"""JetStream's error code while its servers are electing a leader."""
_NO_ROOM = {10023: "", 10028: "memory", 10047: "file"}
"""JetStream's codes for a stream that is larger than the storage that is left, and the kind of storage."""


FLEET_METADATA = "kvatlas_fleet"

_log = logging.getLogger("kvatlas.bus")


@dataclass(frozen=True, slots=True)
class StreamSettings:
    """How the event stream is stored. It is a change log: snapshots make up for what it loses."""

    replicas: int = 1
    max_bytes: int = 1 << 30
    max_age_s: int = 30 * 60
    storage: Literal["file", "memory"] = "file"


@dataclass(frozen=True, slots=True)
class StreamInfo:
    """The position of the event stream. `creation_us` distinguishes the stream from a successor of the same name."""

    creation_us: int
    first_seq: int
    last_seq: int


class StreamTooLarge(Unreachable):
    """NATS has no room for a stream of this size. Waiting may help."""


async def ensure_stream(client: Client, settings: StreamSettings) -> None:
    """Create the event stream unless it exists; an existing stream keeps the configuration that its operator gave it.

    Raises Unreachable if the server does not answer now, and KvatlasError if it refuses or the stream of that name holds
    different subjects.
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
        if isinstance(error, APIError) and error.err_code in _NO_ROOM:
            raise StreamTooLarge(_too_large_line(settings, reason(error))) from error
        kind = Unreachable if _is_temporary(error) else KvatlasError
        raise kind(f"stream {STREAM} can't be created: {reason(error)}") from error
    if found.config.subjects != [ALL_EVENTS]:
        raise KvatlasError(f"stream {STREAM} holds subjects {found.config.subjects}; expected {[ALL_EVENTS]}")


async def stream_fleet(client: Client) -> str | None:
    """The fleet that the stream's metadata names. None if there is no stream or no metadata (with NATS before 2.10, or for a
    stream that an earlier version created). Raises Unreachable."""
    try:
        found = await client.jetstream().stream_info(STREAM)
    except NotFoundError:
        return None
    except (APIError, NatsError, TimeoutError) as error:
        raise Unreachable(f"stream {STREAM}: {reason(error)}") from error
    return (found.config.metadata or {}).get(FLEET_METADATA)


async def mark_stream(client: Client, fleet_id: str) -> None:
    """Write the fleet into the stream's metadata. Does nothing if the user is not allowed to change the stream."""
    jetstream = client.jetstream()
    try:
        found = await jetstream.stream_info(STREAM)
        metadata = {**(found.config.metadata or {}), FLEET_METADATA: fleet_id}
        await jetstream.update_stream(replace(found.config, metadata=metadata))
    except (APIError, NatsError, TimeoutError) as error:
        _log.info("stream %s is not marked with its fleet: %s", STREAM, reason(error))


async def stream_info(client: Client) -> StreamInfo:
    """The stream's position. Raises NotFoundError if the stream does not exist, or another nats error if the server does not
    answer."""
    # read the raw reply: nats-py 2.16's StreamInfo drops the sub-second part of the creation time on some versions
    reply = await client.request(f"$JS.API.STREAM.INFO.{STREAM}", b"", timeout=5)
    answer = json.loads(reply.data)
    if "error" in answer:
        APIError.from_error(answer["error"])  # raises the error that matches the code
    state = answer["state"]
    return StreamInfo(microseconds_of(answer["created"]), int(state["first_seq"]), int(state["last_seq"]))


def microseconds_of(rfc3339: str) -> int:
    """An RFC 3339 time, with up to nine decimals, as microseconds since 1970."""
    whole, _, fraction = rfc3339.rstrip("Z").partition(".")
    seconds = int(datetime.fromisoformat(whole).replace(tzinfo=UTC).timestamp())
    return seconds * 1_000_000 + int((fraction + "000000")[:6])


def _too_large_line(settings: StreamSettings, said: str) -> str:
    option = "max_file_store" if settings.storage == "file" else "max_memory_store"
    return (
        f"stream {STREAM} can't be created: it may take {settings.max_bytes / (1 << 20):,.0f} MiB, and JetStream has less "
        f"{settings.storage} storage left ({said}); lower the indexers' --stream-max-bytes, or raise JetStream's {option}"
    )


def _is_temporary(error: BaseException) -> bool:
    """True if the same request may succeed a little later."""
    if isinstance(error, APIError):
        return error.err_code == _TEMPORARILY_UNAVAILABLE
    return isinstance(error, (TimeoutError, ConnectionClosedError, ConnectionReconnectingError, StaleConnectionError))
