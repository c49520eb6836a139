"""The event stream, which one replica's readers share; it is created again if it is gone."""

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
        """Create the stream if it is missing. Raises whatever `ensure_stream` raises."""
        async with self._lock:
            await ensure_stream(self._client, self._settings)

    async def info(self) -> StreamInfo:
        """The stream's current position; the stream is created if it is missing. Raises KvatlasError or a nats error."""
        try:
            return await stream_info(self._client)
        except NotFoundError:
            await self.ensure()
            return await stream_info(self._client)


def stream_settings(settings: IndexerSettings) -> StreamSettings:
    """How to create the event stream."""
    return StreamSettings(
        replicas=settings.stream_replicas,
        max_bytes=settings.stream_max_bytes,
        max_age_s=settings.stream_max_age_s,
        storage=settings.stream_storage,
    )
