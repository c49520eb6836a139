"""The event stream, made again if it is gone; one replica's readers share it."""

import anyio
from nats.aio.client import Client
from nats.js.errors import NotFoundError

from kvatlas.bus.stream import StreamInfo, StreamSettings, ensure_stream, stream_info
from kvatlas.settings import IndexerSettings


class EventStream:
    def __init__(self, client: Client, settings: StreamSettings) -> None:
        self._client = client
        self._settings = settings
        self._lock = anyio.Lock()

    async def ensure(self) -> None:
        """Make the stream if there is none. Raises what `ensure_stream` raises."""
        async with self._lock:
            await ensure_stream(self._client, self._settings)

    async def info(self) -> StreamInfo:
        """Where the stream stands; it is made if there is none. Raises KvatlasError, and nats errors."""
        try:
            return await stream_info(self._client)
        except NotFoundError:
            await self.ensure()
            return await stream_info(self._client)


def stream_settings(settings: IndexerSettings) -> StreamSettings:
    """How the event stream is made."""
    return StreamSettings(
        replicas=settings.stream_replicas,
        max_bytes=settings.stream_max_bytes,
        max_age_s=settings.stream_max_age_s,
        storage=settings.stream_storage,
    )
