"""Workers' messages as changes that one tenant may see.

A copy keeps each worker's incarnation and blocks and, during a snapshot of the worker, a second set of blocks:

    snapshot  blocks that a worker has now; `aside`: they belong to the second set
    begin     an empty second set begins
    stored    blocks are added, to the second set if there is one
    removed   blocks are removed, from the second set if there is one
    cleared   all blocks and marks of that set are removed
    marked    a prompt can be resumed at these blocks
    unmarked  a prompt can no longer be resumed at these blocks
    end       the second set replaces the first
    gone      the worker has no blocks until its next begin
    live      the snapshot is over; changes follow

Marks matter for a worker whose `dropped` is a number: its engine, which runs a hybrid model, resumes a prompt only at a marked
block, and then reuses all blocks up to that one except for the last `dropped`. Each set has its own marks. `dropped` null: the
engine resumes after any block.

Drop changes whose incarnation is lower than the worker's; a higher one starts with a begin. Changes may be repeated, along with
all that followed them, which is harmless because each sets a state. An end without a second set changes nothing.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvatlas.blocks.block_sizes import BlockSizes
from kvatlas.blocks.external_chain import hash_text
from kvatlas.blocks.hashing import unpack_hashes
from kvatlas.blocks.tiers import Tier
from kvatlas.bus import wire
from kvatlas.bus.partition_batch import Position
from kvatlas.errors import InvalidValue
from kvatlas.fleet.tenants import PART_MARK
from kvatlas.identity import Scope

_PLAIN = {wire.END: "end", wire.CLEARED: "cleared"}
_OF_BLOCKS = {wire.STORED: "stored", wire.CHUNK: "stored", wire.REMOVED: "removed"}
_OF_MARKS = {wire.MARKED: "marked", wire.UNMARKED: "unmarked"}


@dataclass(frozen=True, slots=True)
class Change:
    """A change. `position=None`: it is part of a snapshot, which can't be resumed."""

    kind: str
    data: Mapping[str, Any]
    position: Position | None = None


@dataclass(frozen=True, slots=True)
class View:
    """What one caller may see. `sees`: true for a worker that it may see; `may_use`: true for a model that it may use."""

    tenant_id: str
    may_use: Callable[[str], bool] = lambda _: True
    sees: Callable[[str], bool] = lambda _: True

    def includes(self, scope: Scope) -> bool:
        """True for the caller's own blocks, including those with its cache salts."""
        is_own = scope.tenant_id == self.tenant_id or scope.tenant_id.startswith(self.tenant_id + PART_MARK)
        return is_own and self.may_use(scope.adapter_id or scope.model_id)


@dataclass(slots=True)
class _Worker:
    """A worker, as far as the caller knows it. `seq=None`: not known yet. `shown`: the caller knows of the worker. `aside`:
    a snapshot of it is under way. `doubted`: for the caller, the worker is gone until a higher incarnation begins.
    `dropped`: the value to send as a field of changes; empty: the caller already knows it."""

    incarnation: int
    seq: int | None = None
    shown: bool = False
    aside: bool = False
    doubted: bool = False
    dropped: Mapping[str, int | None] = field(default_factory=dict)


@dataclass(slots=True)
class ChangeReader:
    """Reads the stream's messages in order for one caller. Messages that the index does not apply result in no
    changes."""

    view: View
    _workers: dict[str, _Worker] = field(default_factory=dict)

    def know(self, worker_id: str, incarnation: int, *, aside: bool, dropped: int | None) -> None:
        """Record a worker's state in the store before the first message."""
        said = {"dropped": dropped}
        self._workers[worker_id] = _Worker(incarnation, shown=aside, aside=aside, dropped=said)

    def show(self, worker_id: str) -> None:
        """Record that the caller knows of this worker from now on."""
        self._workers[worker_id].shown = True

    def read(self, raw: wire.RawMessage) -> list[dict[str, Any]]:
        """The message's changes, each with its `kind`."""
        worker_id, incarnation, seq = raw[wire.WORKER_ID], raw[wire.INCARNATION], raw[wire.SEQ]
        events = raw[wire.EVENTS]
        if not self.view.sees(worker_id):
            return []
        worker = self._workers.get(worker_id)
        if worker is None or incarnation > worker.incarnation:
            begins = bool(events) and events[0][wire.CODE] == wire.BEGIN and seq == 0
            if worker is not None and not begins:
                return self._doubt(worker)
            worker = self._workers[worker_id] = _Worker(incarnation, shown=worker is not None and worker.shown)
        elif incarnation < worker.incarnation or (worker.seq is not None and seq <= worker.seq):
            return []
        elif worker.doubted or (worker.seq is not None and seq != worker.seq + 1):
            return self._doubt(worker)
        worker.seq = seq
        scopes = {id: wire.scope_use(id, entry).scope for id, entry in raw[wire.SCOPES].items()}
        return [change for event in events for change in self._of_event(worker, event, scopes, raw[wire.SCOPES])]

    def gone(self, worker_id: str, incarnation: int) -> bool:
        """Record that the index closed this incarnation. Returns True if that is news to the caller."""
        worker = self._workers.get(worker_id)
        if not self.view.sees(worker_id) or (worker is not None and worker.incarnation > incarnation):
            return False
        is_news = worker is None or not worker.doubted
        self._workers[worker_id] = _Worker(incarnation, doubted=True)
        return is_news

    def _doubt(self, worker: _Worker) -> list[dict[str, Any]]:
        """Handle a missing message. The index asks the worker for a snapshot; until it arrives, a copy has none of the
        worker's blocks."""
        is_news = not worker.doubted
        worker.doubted = True
        return [{"kind": "gone"}] if is_news and worker.shown else []

    def _of_event(
        self, worker: _Worker, event: list[Any], scopes: Mapping[bytes, Scope], entries: Mapping[bytes, list[Any]]
    ) -> list[dict[str, Any]]:
        code = event[wire.CODE]
        if code == wire.BEGIN:
            worker.aside = True
            worker.dropped = {"dropped": event[wire.DROPPED] if len(event) > wire.DROPPED else None}
            return [{"kind": "begin", **worker.dropped}] if worker.shown else []
        if code in _PLAIN:
            worker.aside = worker.aside and code != wire.END
            return [{"kind": _PLAIN[code]}] if worker.shown else []
        if code not in _OF_BLOCKS and code not in _OF_MARKS:
            return []
        scope, entry = scopes[event[wire.SCOPE_ID]], entries[event[wire.SCOPE_ID]]
        if not self.view.includes(scope):
            return []
        missed = [{"kind": "begin", **worker.dropped}] if worker.aside and not worker.shown else []
        worker.shown = True
        tier = Tier.HBM if code in _OF_MARKS else Tier(event[wire.TIER])
        fields = scope_fields(scope, wire.sizes_of(entry), tier)
        if code in _OF_MARKS:
            hashes = hash_texts(event[wire.MARK_HASHES])
            return [*missed, {"kind": _OF_MARKS[code], **worker.dropped, **fields, "hashes": hashes}]
        hashes = hash_texts(event[wire.HASHES])
        return [*missed, {"kind": _OF_BLOCKS[code], **worker.dropped, **fields, "tier": tier.label, "hashes": hashes}]


def hash_texts(packed: bytes) -> list[str]:
    """Packed hashes as text."""
    return [hash_text(one) for one in unpack_hashes(packed)]


def scope_fields(scope: Scope, sizes: BlockSizes, tier: Tier) -> dict[str, Any]:
    """The fields of a change that describe its blocks in a tier."""
    return {
        "model_id": scope.model_id,
        "tokenizer_id": scope.tokenizer_id,
        "adapter_id": scope.adapter_id,
        "tenant_id": scope.tenant_id,
        "chain": scope.chain,
        "block_size": sizes.block_size,
        "block_bytes": sizes.bytes_in(tier),
    }


def position_text(position: Position) -> str:
    return f"{position.creation_us}-{position.seq}"


def read_position(text: str) -> Position:
    """Read a position. Raises InvalidValue."""
    creation, _, seq = text.partition("-")
    if not (creation.isdecimal() and seq.isdecimal() and len(text) <= 64):
        raise InvalidValue(f"position {text!r:.80}; expected the id of a change")
    return Position(int(creation), int(seq))
