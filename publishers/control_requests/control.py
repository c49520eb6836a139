"""Answers requests on a publisher's control subject: for a snapshot, its status, its digest or individual blocks."""

from collections.abc import Callable, Mapping
from time import time_ns
from typing import Any

from nats.aio.msg import Msg

from kvatlas.blocks.digest import Digest, MarkDigest
from kvatlas.blocks.hashing import HASH_BYTES
from kvatlas.bus.control import ControlOp, ControlReply, ControlRequest, ScopeDigest
from kvatlas.bus.subjects import control_subject, partition_of
from kvatlas.events import Marked
from kvatlas.incarnation import check_incarnation
from kvatlas_publishers.control_requests.named_blocks import blocks_named, engine_hashes_of, names_of
from kvatlas_publishers.control_requests.responder import Responder
from kvatlas_publishers.engine_events import EngineBatch, EngineDropped
from kvatlas_publishers.ledger.ledger import Ledger
from kvatlas_publishers.parts import PublisherParts

MAX_SCOPES = 1_000
"""More scopes would not fit into one message of the bus."""


class ControlResponder(Responder):
    """Answers requests on the publisher's control subject."""

    def __init__(
        self, parts: PublisherParts, *, status: Callable[[], dict[str, Any]], checkpoint: Callable[[], None]
    ) -> None:
        """`checkpoint` folds and publishes pending events, then a checkpoint."""
        super().__init__(parts, control_subject(parts.worker_id))
        self._changelog = parts.changelog
        self._counters = parts.counters
        self._worker_id = parts.worker_id
        self._partitions = parts.settings.partitions
        self._status = status
        self._checkpoint = checkpoint

    def reply(self, msg: Msg) -> ControlReply:
        request = ControlRequest.unpack(msg.data)
        match request.op:
            case ControlOp.SNAPSHOT:
                return self._request_snapshot(request, msg.headers)
            case ControlOp.STATUS:
                return self._make_reply(status=self._status())
            case ControlOp.DIGEST:
                return self._digest()
            case ControlOp.BLOCKS:
                if request.engine_hash is None:
                    return self._make_reply(ok=False, note="no engine_hash; expected the hash of the blocks")
                self._checkpoint()
                return self._make_reply(blocks=blocks_named(self._changelog.ledger.lineage, request.engine_hash))
            case ControlOp.DROP:
                return self._drop(request)

    def refusal(self, error: Exception) -> ControlReply:
        return self._make_reply(ok=False, note=str(error))

    def _request_snapshot(self, request: ControlRequest, headers: Mapping[str, str] | None) -> ControlReply:
        """Begin a new incarnation above the one that is in doubt. `headers`: the request's headers, which carry its
        trace context.

        Raises InvalidValue for an impossible `above`.
        """
        check_incarnation(request.above, time_ns() // 1_000)
        self._counters.snapshot_requests += 1
        if not self._is_partition_of(request.partitions):
            self._counters.snapshot_requests_ignored += 1
            return self._make_reply(ok=False, note=f"it publishes to one of {self._partitions} partitions")
        if not self._changelog.request_snapshot(request.above, headers):
            self._counters.snapshot_requests_ignored += 1
            return self._make_reply(note=f"incarnation {self._changelog.outbox.incarnation} is above it already")
        self._parts.due.wake()
        return self._make_reply()

    def _digest(self) -> ControlReply:
        """Publish a checkpoint, and return the digests of everything published up to it."""
        self._checkpoint()
        changelog = self._changelog
        if changelog.incarnation_due is not None or not changelog.outbox.incarnation:
            return self._make_reply(ok=False, note="a new incarnation is about to begin")
        status = {"told_seq": changelog.outbox.next_seq - 1}
        scopes = digests_by_scope(changelog.ledger)
        words, marks = changelog.ledger.digest.words, marks_of(changelog.ledger)
        return self._make_reply(digest=words, marks=marks, scopes=scopes, status=status)

    def _drop(self, request: ControlRequest) -> ControlReply:
        """Drop blocks as if the engine had reported their removal. If it stores them again, they are published again."""
        if (request.engine_hash is None) == (request.block is None):
            return self._make_reply(ok=False, note="expected either the engine_hash of blocks or a block")
        self._checkpoint()
        lineage = self._changelog.ledger.lineage
        if request.block is not None:
            blocks, names = [request.block], names_of(lineage, request.block)
        else:
            assert request.engine_hash is not None
            blocks = blocks_named(lineage, request.engine_hash)
            names = [name for name in engine_hashes_of(request.engine_hash) if lineage.stretches_named(name)]
        if names:
            self._changelog.record(EngineBatch([EngineDropped(names, None)], 0.0))
            self._checkpoint()
        return self._make_reply(blocks=blocks if names else [])

    def _is_partition_of(self, partitions: int) -> bool:
        """True if a fleet with this many partitions (0: unknown) reads the subject to which the worker's messages are
        published."""
        if not partitions or partition_of(self._worker_id, partitions) == partition_of(
            self._worker_id, self._partitions
        ):
            self._parts.diagnoses.clear("partitions")
            return True
        seen = f"the indexers have {partitions} partitions, but --partitions is {self._partitions}"
        self._parts.diagnoses.set("partitions", f"{seen}: they refuse every message", f"set --partitions {partitions}")
        return False

    def _make_reply(self, *, ok: bool = True, **fields: Any) -> ControlReply:
        outbox = self._changelog.outbox
        return ControlReply(
            ok=ok, worker_id=self._worker_id, incarnation=outbox.incarnation, acked_seq=outbox.acked_seq, **fields
        )


def marks_of(ledger: Ledger) -> list[int]:
    """The digest words of the ledger's marks, counted from their snapshot; empty if there are no marks."""
    if ledger.dropped is None:
        return []
    digest = MarkDigest()
    for event in ledger.mark_snapshot():
        if isinstance(event, Marked):
            digest.add_marks(event.scope_id, event.hashes)
            continue
        for at in range(0, len(event.hashes), HASH_BYTES):
            bits = int.from_bytes(event.bits[at : at + HASH_BYTES], "big")
            digest.add_head(event.scope_id, event.hashes[at : at + HASH_BYTES], bits)
    return digest.words


def digests_by_scope(ledger: Ledger) -> list[ScopeDigest] | None:
    """Digests of the ledger's published blocks, counted from its snapshot; None if there are too many scopes for a reply."""
    digests: dict[bytes, Digest] = {}
    for chunk in ledger.snapshot():
        digests.setdefault(chunk.scope_id, Digest()).add(chunk.scope_id, chunk.tier, chunk.hashes)
    if len(digests) > MAX_SCOPES:
        return None
    scopes = [(ledger.uses[scope_id].scope, digest) for scope_id, digest in digests.items()]
    return [
        ScopeDigest(
            model_id=scope.model_id,
            tokenizer_id=scope.tokenizer_id,
            adapter_id=scope.adapter_id,
            tenant_id=scope.tenant_id,
            chain=scope.chain,
            digest=digest.words,
        )
        for scope, digest in scopes
    ]
