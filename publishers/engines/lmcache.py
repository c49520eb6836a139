"""Events of LMCache's multiprocess server (0.5.6): the chunks in its CPU memory, which all attached engines share.

    batch   {enabled, incarnation, next_cursor, lost, events}
    record  {seq, kind: stored | removed, medium: CPU, model_name, block_hashes: [bytes], parent_block_hash, token_ids}

Decisions that the records leave open:
- The server holds a chunk once: two reports of it are not two copies.
- Records carry tokens only, but their prompts may have an adapter, a salt or images. So they count as a connector's blocks
  (`EngineStored.offloaded`), which are trusted only while the engine itself uses none of these.
- `lost`, or a new `incarnation`: earlier reports may be outdated, so all chunks are withdrawn.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from kvatlas.blocks.tiers import Tier
from kvatlas.errors import EngineEventError, InvalidValue
from kvatlas.msgpack_input import unpack
from kvatlas.validation import MAX_BLOCK_TOKENS
from kvatlas_publishers.engine_events import EngineEvent, EngineHash, EngineRemoved, EngineStored

MAX_EVENTS = 1024
"""The server's limit for one batch."""
MAX_BATCH_BYTES = 32 << 20
_NAME = b"lmcache\x00"
"""Prefix of each hash: the engine's own connector may report the same chunks under other names."""


class ChunkEvents:
    """Converts one server's batches to engine events. `held`: names of the chunks it holds."""

    def __init__(self, held: Iterable[EngineHash] = ()) -> None:
        """`held`: names that a ledger already knows; only the names of LMCache chunks are kept."""
        self.held = {name for name in held if isinstance(name, bytes) and name.startswith(_NAME)}
        self._incarnation: int | None = None

    def withdraw(self) -> list[EngineEvent]:
        """Withdraw all chunks, and return the events of their removal."""
        held, self.held, self._incarnation = self.held, set(), None
        return [EngineRemoved(sorted(held), Tier.CPU_DRAM)] if held else []

    def decode(self, payload: bytes) -> list[EngineEvent]:
        """The events of an encoded batch. Raises EngineEventError if it can't be read or the server records no events."""
        try:
            batch = unpack(payload, max_bytes=MAX_BATCH_BYTES)
        except InvalidValue as error:
            raise EngineEventError(f"batch of {error}") from error
        records = batch.get("events") if isinstance(batch, dict) else None
        if not isinstance(records, list) or type(batch.get("incarnation")) is not int:
            raise EngineEventError(f"batch {batch!r:.80}; expected a map with incarnation and events")
        if batch.get("enabled") is not True:
            raise EngineEventError(
                "the server records no events (its --kv-event-log-size is 0, or observability is off)"
            )
        events: list[EngineEvent] = []
        if batch.get("lost") or self._incarnation not in (None, batch["incarnation"]):
            events = self.withdraw()
        self._incarnation = batch["incarnation"]
        for record in records:
            if not isinstance(record, dict):
                raise EngineEventError(f"record {record!r:.80}; expected a map")
            events += self._decode(record)
        return events

    def _decode(self, record: Mapping[str, Any]) -> Iterator[EngineEvent]:
        kind, medium, raw_hashes = record.get("kind"), record.get("medium"), record.get("block_hashes")
        if not isinstance(raw_hashes, list) or any(not isinstance(one, bytes) for one in raw_hashes):
            raise EngineEventError(f"record with block_hashes {raw_hashes!r:.60}; expected an array of bytes")
        if kind not in ("stored", "removed"):
            raise EngineEventError(f"record of kind {kind!r:.40}; expected stored or removed")
        if medium != "CPU":
            return
        names = [_NAME + one for one in raw_hashes]
        if kind == "removed":
            gone = [name for name in names if name in self.held]
            self.held.difference_update(gone)
            if gone:
                yield EngineRemoved(gone, Tier.CPU_DRAM)
            return
        parent, tokens = record.get("parent_block_hash"), record.get("token_ids")
        if not isinstance(parent, (bytes, type(None))) or not isinstance(tokens, list):
            raise EngineEventError(
                f"record has parent {parent!r:.40} and token_ids {tokens!r:.40}; expected bytes or nil, and an array"
            )
        if not tokens or len(names) != 1 or len(tokens) > MAX_BLOCK_TOKENS or set(map(type, tokens)) != {int}:
            raise EngineEventError(
                f"record has {len(names)} stored chunks with {len(tokens)} tokens; expected one chunk"
            )
        if names[0] not in self.held:
            self.held.add(names[0])
            above = None if parent is None else _NAME + parent
            yield EngineStored(names, above, tokens, len(tokens), tier=Tier.CPU_DRAM, offloaded=True)
