"""Requests for an engine's own hashes of blocks, by which other engines fetch these blocks (`kv.fetch`), over core NATS.

They have a subject of their own, because they are sent by routers, which may not send the requests in `kvatlas.bus.control`.
"""

from typing import Annotated

from pydantic import Field

from kvatlas.bus.control import ScopeFields, SequenceHash
from kvatlas.fleet.records import WireRecord, WorkerId

MOST_HASHES = 16_384
"""Maximum number of hashes in a request."""


class EngineHashesRequest(ScopeFields):
    """A request on `kvatlas.hashes.<worker>`: the sequence hashes of a prompt's first blocks, in order."""

    sequence_hashes: Annotated[list[SequenceHash], Field(max_length=MOST_HASHES)]


class EngineHashesReply(WireRecord):
    """The engine's own hashes of these blocks, up to the first block that it does not hold or has no number for."""

    worker_id: WorkerId
    hashes: Annotated[list[Annotated[int, Field(ge=-(1 << 63), lt=1 << 64)]], Field(max_length=MOST_HASHES)]
