"""Requests to publishers and indexers over core NATS: snapshots, status, digests, blocks by name, and grants."""

from enum import StrEnum
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, Field

from kvatlas.fleet.records import WireRecord, WorkerId
from kvatlas.identity import OWN_CHAIN, Scope, check_chain
from kvatlas.validation import AckedSeq, Count, Incarnation, Name

SequenceHash = Annotated[int, Field(ge=0, lt=1 << 64)]
MAX_HASH_TEXT = 512
DigestWords = Annotated[list[Count], Field(max_length=64)]

UNGRANTED_SNAPSHOT_BYTES = 64 * 1024
"""Snapshots up to this size need no grant."""
MAX_SNAPSHOT_BYTES = 1 << 40
"""A limit far above what the store has memory for."""
MAX_RETRY_AFTER_MS = 60_000


class ControlOp(StrEnum):
    SNAPSHOT = "snapshot"
    STATUS = "status"
    DIGEST = "digest"
    BLOCKS = "blocks"
    DROP = "drop"


class ScopeFields(WireRecord):
    """An identity scope as a record."""

    model_id: Name
    tokenizer_id: Name
    adapter_id: Name | None = None
    tenant_id: Name
    chain: Annotated[str, AfterValidator(check_chain)] = OWN_CHAIN

    @classmethod
    def fields_of(cls, scope: Scope) -> dict[str, Any]:
        names = ("model_id", "tokenizer_id", "adapter_id", "tenant_id", "chain")
        return {name: getattr(scope, name) for name in names}

    @property
    def scope(self) -> Scope:
        return Scope(self.model_id, self.tokenizer_id, self.adapter_id, self.tenant_id, self.chain)


class NamedBlock(ScopeFields):
    """A block that an engine's hash stands for, and the block before it (None: it is a first block)."""

    sequence_hash: SequenceHash
    parent: SequenceHash | None = None


class ControlRequest(WireRecord):
    """A request on `kvatlas.control.<worker>`.

    For a snapshot, `above` is the incarnation that the requester doubts: a publisher whose incarnation is already higher
    ignores the request; any other publisher starts a new incarnation above it. `partitions`: the partition count of the
    requester's layout; 0: not given.

    `engine_hash` requests the blocks that this hash stands for. A request to drop blocks names all of these by `engine_hash`,
    or a single one of them by `block`. Dropped blocks count as removed by the engine.
    """

    op: ControlOp
    above: Incarnation = 0
    partitions: Count = 0
    engine_hash: Annotated[str, Field(min_length=1, max_length=MAX_HASH_TEXT)] | None = None
    block: NamedBlock | None = None


class ScopeDigest(ScopeFields):
    """The digest of what a worker holds in one scope, in the form of `Digest.words`."""

    digest: DigestWords


class ControlReply(WireRecord):
    """A publisher's reply. If it is not `ok`, `note` says why. `status` answers a status request.

    A digest request is answered with `digest` (`Digest.words`), `scopes` (the same for each scope; None: there are too many
    scopes) and `marks` (`MarkDigest.words` of a worker with marks). All of them are as of a checkpoint, `status["told_seq"]`,
    that the publisher sends to the stream for the requester.

    A request for blocks, or a request to drop some, is answered with the `blocks` concerned.
    """

    max_bytes: ClassVar[int] = 4 << 20

    ok: bool
    worker_id: WorkerId
    incarnation: Incarnation
    acked_seq: AckedSeq
    note: str = ""
    digest: DigestWords | None = None
    marks: DigestWords = Field(default_factory=list)
    scopes: list[ScopeDigest] | None = None
    blocks: list[NamedBlock] | None = None
    status: dict[str, Any] | None = None


class GrantRequest(WireRecord):
    """A request on `kvatlas.grant.<partition>.<worker>`, sent before a snapshot larger than `UNGRANTED_SNAPSHOT_BYTES`."""

    worker_id: WorkerId
    incarnation: Incarnation
    snapshot_bytes: Annotated[int, Field(ge=0, le=MAX_SNAPSHOT_BYTES)]


class GrantReply(WireRecord):
    """The owner's reply. If the grant is refused, the publisher asks again after `retry_after_ms`, with jitter."""

    granted: bool
    retry_after_ms: Annotated[int, Field(ge=0, le=MAX_RETRY_AFTER_MS)] = 0
