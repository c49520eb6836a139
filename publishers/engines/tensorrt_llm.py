"""TensorRT-LLM's KV cache events as trtllm-serve returns them (1.2, 1.3): JSON records, each returned to only one reader.

    {"event_id", "data", "window_size", "attention_dp_rank"?, "layer_group_id"?, "hash_algo"?}
    data: created {num_blocks_per_cache_level}, stored {parent_hash, blocks}, removed {block_hashes},
          updated {block_hash, cache_level: {old_value, new_value} | null, priority}
    block: {block_hash, tokens: [{token_id, token_extra_id}], cache_level, priority, mm_keys?, cache_salt?}

Decisions that the records leave open:
- A group is a window size (and layer group). The largest window is full attention. We can't tell what the blocks of a smaller
  window mean for reuse, so such a model is published as an upper bound.
- The engine's tree holds a block once: two reports of it are not two copies (`LedgerSettings.set_semantics`). A removal does
  not name the block's level, so we remember it. Level 0 is HBM, all others are DRAM.
- Events omit adapters (and in some versions salts), but the engine's hashes cover them. So the hashes of the first and the last
  plain block of each stored run are computed from their tokens; if one differs, the run is left out. An adapter is in every
  block's hash, a salt only in that of a prompt's first block.
- A block with images (`mm_keys`, `token_extra_id`) and all later blocks of its run are left out.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvatlas.blocks.kv_cache_groups import AttentionKind
from kvatlas.blocks.tiers import Tier
from kvatlas.errors import DATA_ERRORS, EngineEventError
from kvatlas.validation import MAX_BLOCK_TOKENS, MAX_NUMBER
from kvatlas_publishers.engine_events import EngineCleared, EngineEvent, EngineRemoved, EngineStored

HASH_ALGORITHM = "v1_block_key"
"""The only hash algorithm that is implemented here. Records without `hash_algo` use it."""
MAX_BODY_BYTES = 64 << 20
MAX_GROUPS = 64
MAX_ALGORITHM = 40

_U32, _U64 = (1 << 32) - 1, (1 << 64) - 1
_TIERS = (Tier.HBM, Tier.CPU_DRAM)

Fields = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Record:
    """One record of an answer. `event_id` counts from 0 in each engine process, without a gap in each `rank`."""

    event_id: int
    rank: int
    fields: Fields

    @property
    def kind(self) -> Any:
        """The `type` of the record's data."""
        data = self.fields.get("data")
        return data.get("type") if isinstance(data, dict) else None


def read_records(body: bytes) -> Sequence[Record]:
    """The records of one answer, in order. Raises EngineEventError, with a one-line message, if the answer is not an
    array of records."""
    try:
        raw_records = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise EngineEventError(f"answer of {len(body)} bytes is not JSON: {error!s:.80}") from error
    if not isinstance(raw_records, list):
        raise EngineEventError(f"answer is {raw_records!r:.60}; expected an array of events")
    records = []
    for raw in raw_records:
        event_id, rank = (raw.get("event_id"), raw.get("attention_dp_rank")) if isinstance(raw, dict) else (None, None)
        if type(event_id) is not int or not 0 <= event_id <= MAX_NUMBER or type(rank) not in (int, type(None)):
            raise EngineEventError(f"event {raw!r:.80}; expected a map with an event_id and, if any, attention_dp_rank")
        records.append(Record(event_id, rank or 0, raw))
    return records


def plain_block_hash(token_ids: Sequence[int], parent_hash: int) -> int:
    """The engine's hash (`v1_block_key`) of a text block without adapter and salt; `parent_hash` 0: a prompt's first block."""
    seed = (len(token_ids) ^ parent_hash * 0xBF58476D1CE4E5B9) & _U64
    for token in token_ids:
        mixed = token & _U32
        mixed = ((mixed >> 16) ^ mixed) * 0x45D9F3B & _U32
        mixed = ((mixed >> 16) ^ mixed) * 0x45D9F3B & _U32
        mixed = ((mixed >> 16) ^ mixed) + 0x9E3779B9 & _U32
        seed ^= mixed + (seed << 6 & _U64) + (seed >> 2) & _U64
    return seed


class EventDecoder:
    """Converts the records of one engine process to engine events. Call `forget` when the process changes.

    `verified`: number of stored runs whose hashes match their tokens; `foreign`: number of those whose hashes don't.
    `foreign_algorithm`: the hash algorithm that foreign runs name, if any.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Reset for a new engine process."""
        self.verified = self.foreign = 0
        self.foreign_algorithm = ""
        self._groups: dict[tuple[int, int], int] = {}
        self._largest_window = 0
        self._offloaded: set[tuple[int, int]] = set()

    def decode(self, record: Record) -> list[EngineEvent]:
        """The record's events. Raises EngineEventError if the record can't be read."""
        fields = record.fields
        data = fields.get("data")
        if not isinstance(data, dict):
            raise EngineEventError(f"event {record.event_id} with data {data!r:.60}; expected a map")
        group = self._group(fields)
        kind = record.kind
        try:
            if kind == "stored":
                return list(self._stored(fields, data, group))
            if kind == "removed":
                return self._removed(_hashes(data.get("block_hashes")), group)
            if kind == "updated":
                return self._updated(data, group)
        except EngineEventError:
            raise
        except DATA_ERRORS as error:
            raise EngineEventError(f"{kind} event {record.event_id}: {type(error).__name__} {error!s:.80}") from error
        if kind == "created":
            return [EngineCleared(_TIERS)]
        raise EngineEventError(f"unknown event {kind!r:.60}")

    def _group(self, fields: Fields) -> int:
        """The group's index; 0 if the engine reports no windows."""
        window, layers = fields.get("window_size") or 0, fields.get("layer_group_id") or 0
        if type(window) is not int or type(layers) is not int or not 0 <= window <= MAX_NUMBER:
            raise EngineEventError(
                f"event has window_size {window!r:.40} and layer_group_id {layers!r:.40}; expected integers"
            )
        group = self._groups.setdefault((window, layers), len(self._groups))
        if group >= MAX_GROUPS:
            raise EngineEventError(f"events name more than {MAX_GROUPS} windows and layer groups")
        self._largest_window = max(window, self._largest_window)
        return group

    # ---------------------------------------------------------------- stored

    def _stored(self, fields: Fields, data: Fields, group: int) -> Iterator[EngineEvent]:
        algorithm = fields.get("hash_algo") or HASH_ALGORITHM
        if algorithm != HASH_ALGORITHM:
            self.foreign += 1
            self.foreign_algorithm = str(algorithm)[:MAX_ALGORITHM]
            raise EngineEventError(f"block hashes use {algorithm!r:.40}; expected {HASH_ALGORITHM}")
        blocks, parent = data.get("blocks"), data.get("parent_hash")
        if not isinstance(blocks, list) or (parent is not None and type(parent) is not int):
            raise EngineEventError(
                f"event has blocks {blocks!r:.40} and parent_hash {parent!r:.40}; expected an array and an integer"
            )
        plain = _plain_run(blocks)
        if blocks and not plain:
            raise EngineEventError(f"{len(blocks)} stored blocks begin with an image: left out")
        if plain and not self._is_plain(plain, parent):
            self.foreign += 1
            raise EngineEventError(f"the hash of {len(blocks)} stored blocks does not match their tokens: left out")
        self.verified += bool(plain)
        kind = AttentionKind.FULL if (fields.get("window_size") or 0) == self._largest_window else AttentionKind.OTHER
        salt = blocks[0].get("cache_salt") if blocks else None
        first = 0
        while first < len(plain):  # one event for consecutive blocks of the same size and level; the last may be short
            size, level = len(plain[first].tokens), plain[first].level
            last = first + 1
            while last < len(plain) and (len(plain[last].tokens), plain[last].level) == (size, level):
                last += 1
            run = plain[first:last]
            hashes = [block.hash for block in run]
            yield EngineStored(
                hashes=hashes,
                parent=plain[first - 1].hash if first else parent,
                token_ids=[token for block in run for token in block.tokens],
                block_size=size,
                tier=self._place(hashes, group, level),
                group=group,
                salt=salt or None,
                kind=kind,
            )
            first = last

    def _is_plain(self, run: Sequence["_Block"], parent: int | None) -> bool:
        """True if the hashes of the run's blocks match their tokens and the reported salt."""
        first, last, before = run[0], run[-1], run[-2].hash if len(run) > 1 else parent
        if parent is None and first.salt is None and first.hash & _U64 != plain_block_hash(first.tokens, 0):
            return False
        if before is None:  # a salted block's hash can't be computed, so we can't tell whether it has an adapter
            return first.salt is None
        return last.hash & _U64 == plain_block_hash(last.tokens, before)

    def _place(self, hashes: Sequence[int], group: int, level: int) -> Tier:
        names = {(group, name) for name in hashes}
        if level == 0:
            self._offloaded -= names
            return Tier.HBM
        self._offloaded |= names
        return Tier.CPU_DRAM

    # ---------------------------------------------------------------- removed, moved

    def _removed(self, hashes: Sequence[int], group: int) -> list[EngineEvent]:
        offloaded = [name for name in hashes if (group, name) in self._offloaded]
        self._offloaded.difference_update((group, name) for name in offloaded)
        gone = set(offloaded)
        in_device = [name for name in hashes if name not in gone] if gone else hashes
        removed = ((in_device, Tier.HBM), (offloaded, Tier.CPU_DRAM))
        return [EngineRemoved(names, tier, group) for names, tier in removed if names]

    def _updated(self, data: Fields, group: int) -> list[EngineEvent]:
        """The events of a block that moved to another level. A change in priority alone does not affect us."""
        diff = data.get("cache_level")
        if diff is None:
            return []
        [name] = _hashes([data.get("block_hash")])
        if not isinstance(diff, dict) or type(diff.get("new_value")) is not int:
            raise EngineEventError(f"updated cache_level {diff!r:.60}; expected old_value and new_value")
        before = Tier.CPU_DRAM if (group, name) in self._offloaded else Tier.HBM
        tier = self._place([name], group, diff["new_value"])
        if tier is before:
            return []
        moved = EngineStored([name], None, (), 0, tier=tier, group=group)
        return [moved, EngineRemoved([name], before, group)]


@dataclass(frozen=True, slots=True)
class _Block:
    hash: int
    tokens: Sequence[int]
    level: int
    salt: str | None


def _plain_run(raw_blocks: Sequence[Any]) -> list[_Block]:
    """The leading blocks of the run that hold text and share one salt. Raises EngineEventError for a malformed block."""
    run: list[_Block] = []
    for raw in raw_blocks:
        salt, level, name = raw.get("cache_salt"), raw.get("cache_level"), raw.get("block_hash")
        if type(name) is not int or type(level) is not int or (salt is not None and not isinstance(salt, str)):
            raise EngineEventError(f"stored block {raw!r:.80}; expected block_hash, cache_level, tokens")
        pairs = [(token.get("token_id"), token.get("token_extra_id")) for token in raw["tokens"]]
        if not 0 < len(pairs) <= MAX_BLOCK_TOKENS:
            raise EngineEventError(f"stored block has {len(pairs)} tokens; expected 1 to {MAX_BLOCK_TOKENS}")
        is_text = not raw.get("mm_keys") and all(type(token) is int and not extra for token, extra in pairs)
        if not is_text or (run and salt != run[0].salt):
            break
        run.append(_Block(name, [token for token, _ in pairs], level, salt))
    return run


def _hashes(raw: Any) -> Sequence[int]:
    if not isinstance(raw, list) or any(type(one) is not int for one in raw):
        raise EngineEventError(f"block hashes {raw!r:.60}; expected an array of integers")
    return raw
