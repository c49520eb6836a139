"""Asks publishers for their engines' own hashes of a prompt's blocks, so that a request can name these blocks to an engine."""

import asyncio
import logging
import time
from typing import TYPE_CHECKING

from kvatlas.bus.access import NatsAccess
from kvatlas.bus.control import ScopeFields
from kvatlas.bus.hash_requests import MOST_HASHES, EngineHashesReply, EngineHashesRequest
from kvatlas.bus.subjects import hashes_subject
from kvatlas.errors import InvalidValue, KvatlasError
from kvatlas.identity import Scope

if TYPE_CHECKING:
    from nats.aio.client import Client

ANSWER_S = 0.25
"""How long a request waits for the answer. If none comes, the engine computes what it would have fetched."""
AGAIN_S = 10.0

_log = logging.getLogger(__name__)


class EngineHashes:
    """Asks the publisher of any worker. Connects to NATS when it is first needed. The caller must call `close`."""

    def __init__(self, nats: NatsAccess, name: str) -> None:
        """`name`: the connection's name, as NATS lists it."""
        self._nats = nats
        self._name = name
        self._client: Client | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._tried_s = float("-inf")

    def is_ready(self) -> bool:
        """True if publishers can be asked now. If they can't, this starts connecting to NATS and returns immediately."""
        if self._client is not None and not self._client.is_closed:
            return self._client.is_connected
        if self._connecting is None and time.monotonic() - self._tried_s > AGAIN_S:
            self._tried_s = time.monotonic()
            self._connecting = asyncio.create_task(self._connect(), name="kvatlas engine hashes")
        return False

    async def ask(self, worker_id: str, scope: Scope, sequence_hashes: list[int]) -> list[int]:
        """The hashes of a chain's first blocks, as far as the worker's engine holds them; empty if there is no answer."""
        if self._client is None:
            return []
        from nats.errors import Error as NatsError

        asked = EngineHashesRequest(**ScopeFields.fields_of(scope), sequence_hashes=sequence_hashes[:MOST_HASHES])
        try:
            msg = await self._client.request(hashes_subject(worker_id), asked.pack(), timeout=ANSWER_S)
            reply = EngineHashesReply.unpack(msg.data)
        except (NatsError, TimeoutError, InvalidValue):
            return []
        return reply.hashes[: len(sequence_hashes)] if reply.worker_id == worker_id else []

    async def close(self) -> None:
        if self._connecting is not None:
            self._connecting.cancel()
            await asyncio.gather(self._connecting, return_exceptions=True)
        if self._client is not None:
            await self._client.close()

    async def _connect(self) -> None:
        from kvatlas.bus.connection import connect_nats  # nats-py takes 11 MiB, and most fleets never fetch by hashes

        try:
            self._client = await connect_nats(self._nats, name=self._name, wait=False)
        except KvatlasError as error:
            line = "%s; engines compute what they would fetch by block hashes; trying again after %g s"
            _log.warning(line, error, AGAIN_S)
        finally:
            self._connecting = None
