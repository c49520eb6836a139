"""What indexers and publishers ask of each other over core NATS: snapshots, status, digests, and grants."""

from enum import StrEnum
from typing import Annotated, Any

from pydantic import Field

from kvatlas.fleet.records import WireRecord, WorkerId
from kvatlas.identity import Scope

Incarnation = Annotated[int, Field(ge=0, lt=1 << 64)]


class ControlOp(StrEnum):
    SNAPSHOT = "snapshot"
    STATUS = "status"
    DIGEST = "digest"


class ControlRequest(WireRecord):
    """Asked on `kvatlas.control.<worker>`.

    For a snapshot, `above` is the incarnation that the asker doubts: a publisher that is already above it ignores the
    request, any other begins a new incarnation above it.
    """

    op: ControlOp
    above: Incarnation = 0


class ScopeDigest(WireRecord):
    """What a worker holds in one scope, as `Digest.words`."""

    model_id: str
    tokenizer_id: str
    adapter_id: str | None = None
    tenant_id: str
    digest: list[int]

    @property
    def scope(self) -> Scope:
        return Scope(self.model_id, self.tokenizer_id, self.adapter_id, self.tenant_id)


class ControlReply(WireRecord):
    """`status` answers a status request; `note` says why not `ok`.

    A digest request is answered with `digest` (`Digest.words`) and the same by scope (None: too many of them), as of
    `status["told_seq"]`, which is a checkpoint put in the stream for the asker.
    """

    ok: bool
    worker_id: WorkerId
    incarnation: Incarnation
    acked_seq: Annotated[int, Field(ge=-1)]
    note: str = ""
    digest: list[int] | None = None
    scopes: list[ScopeDigest] | None = None
    status: dict[str, Any] | None = None


class GrantRequest(WireRecord):
    """Asked on `kvatlas.grant.<partition>` before a snapshot above `UNGRANTED_SNAPSHOT_BYTES`."""

    worker_id: WorkerId
    incarnation: Incarnation
    snapshot_bytes: Annotated[int, Field(ge=0)]


class GrantReply(WireRecord):
    """Not granted: ask again after `retry_after_ms`, with jitter."""

    granted: bool
    retry_after_ms: Annotated[int, Field(ge=0)] = 0


UNGRANTED_SNAPSHOT_BYTES = 64 * 1024
"""Snapshots up to this size need no grant."""
