"""vLLM's KV events, versions 0.9 to 0.33 (and those of the simulated engine, which uses the same protocol).

Decisions that the wire leaves open:
- A group's spec kind defines its attention. Events without one (0.20, 0.21 and before, offloading, removals) use what other
  events of the group said.
- With EAGLE, a block's hash may cover tokens after the block (0.33, `lookahead_token_ids`): then a hit drops no block.
- `locality` REMOTE (0.26 and later) means that the copy is not in this worker's own memory. GPU then becomes remote_hbm; FS,
  OBJ and STORAGE are shared storage, so object_store. CPU of another host has no tier here, so it is skipped and reported.
- Events about tiers other than the device tier come from a KV connector (offloading, Mooncake, LMCache). They have tokens, but
  neither salt nor extra keys, although the hash covers both.
- Removals are reported for GPU and CPU, and for tiers that name themselves in `ownership`. The tier of a file system or object
  store (STORAGE) reports none. Neither do the connectors of Mooncake's store and of in-process LMCache (medium "cpu").
- LMCache's multiprocess connector reports chunks as CPU, without group and locality. Their removal is reported only if its
  server has the event stream.
- `AllBlocksCleared` may cover the device tier only, or a connector's CPU tier too (`/sleep`, `/pause`, `reset_prefix_cache`
  with `reset_connector`), and the event does not say which. So it clears both. Disks and stores keep their blocks, as in the
  offloading connector (`TieringOffloadingManager.reset_cache`, 0.33).
- For a request with `kv_cache_report_mode: "full"` (0.26 and later, so maps), vLLM reports cache hits as stored blocks, from
  the prompt's first block on. They look exactly like new copies: see `ledger.hit_reports`.
- `remaining_copy_counts` (proposed for versions after 0.33): the number of copies of each removed block that remain. A block
  is held until no copy remains. For a version that reports only the last copy's removal, use `--set-semantics`.
- Before 0.14, events carry an adapter's id but not its name, so requests can't be matched to such blocks.
- Before 0.17, the engine's hash covers salt and multimodal items, but events omit them. Such blocks look plain, so everything
  is an upper bound.
"""

import re
from collections.abc import Sequence
from typing import Any

from kvatlas.blocks.hashing import ExtraKeys
from kvatlas.blocks.kv_cache_groups import AttentionKind
from kvatlas.blocks.tiers import Tier, parse_tier
from kvatlas.errors import EngineEventError, UnknownTier
from kvatlas.validation import MAX_LOOKAHEAD
from kvatlas_publishers.engine_events import (
    EngineBatch,
    EngineCleared,
    EngineEvent,
    EngineHash,
    EngineRemoved,
    EngineStored,
)
from kvatlas_publishers.engines import payload as wire

MAX_GROUPS = 1_024
UNTOLD_KEYS = "the events of vLLM before 0.17 have neither the salts nor the images of prompts"

# The order of an array event's fields; in brackets the first version that writes them.
_FIELDS = {
    "BlockStored": (
        "block_hashes",
        "parent_block_hash",
        "token_ids",
        "block_size",
        "lora_id",
        "medium",  # 0.10.2
        "lora_name",  # 0.14
        "extra_keys",  # 0.17
        "group_idx",  # 0.20
        "kv_cache_spec_kind",  # 0.22
        "kv_cache_spec_sliding_window",
        "locality",  # 0.26
        "ownership",
        "session_id",
        "lookahead_token_ids",  # 0.33
    ),
    "BlockRemoved": ("block_hashes", "medium", "group_idx", "locality"),
    "AllBlocksCleared": (),
}

_TOLD_MEDIA = (None, "GPU", "CPU")
_SHARED_STORES = ("cpu", "MOONCAKE", "L2", "redis", "REMOTE", "REMOTE+CPU")
"""A tuple, because a medium may be of any type, even an unhashable one."""
_REMOTE_TIERS = {
    Tier.HBM: Tier.REMOTE_HBM,
    Tier.REMOTE_HBM: Tier.REMOTE_HBM,
    Tier.LOCAL_SSD: Tier.OBJECT_STORE,
    Tier.OBJECT_STORE: Tier.OBJECT_STORE,
}


_CONTENT_HASH = re.compile(r"(?:^|:)[0-9a-f]{64}$")
"""A multimodal identifier that the engine generated, possibly prefixed with the adapter's name."""
_TAGS = (("lora", str), ("mm", str), ("cache_salt", str), ("prompt_embeds", bytes))
"""Tags of the keys that 0.33 hashes. `to_event_extra_keys` drops the tags "until consumers handle the tagged keys"."""


def decode_batch(payload: bytes) -> EngineBatch:
    """Decode one ZMQ payload. Raises EngineEventError if it is not a batch."""
    return wire.decode(payload, _FIELDS, _event)


def decode_simulated_batch(payload: bytes) -> EngineBatch:
    """Decode a payload of the simulated engine. That engine reports each block that it drops from the CPU tier, so a clear
    affects only the device tier. It never reports hits.

    Raises EngineEventError, as `decode_batch` does."""
    batch = decode_batch(payload)
    batch.events = [_as_simulated(one) for one in batch.events]
    return batch


def _as_simulated(event: EngineEvent) -> EngineEvent:
    if isinstance(event, EngineStored):
        event.maybe_again = False
    return EngineCleared((Tier.HBM,)) if isinstance(event, EngineCleared) else event


def _event(tag: str, fields: wire.Fields) -> EngineEvent:
    if tag == "AllBlocksCleared":
        return EngineCleared()
    get = fields.get
    tier = _tier(tag, fields)
    group = 0 if get("group_idx") is None else _group(tag, fields)
    hashes = wire.hashes_of(tag, fields)
    if tag == "BlockRemoved":
        if (left := get("remaining_copy_counts")) is None:
            return EngineRemoved(hashes, tier, group)
        return EngineRemoved(_without_copies(tag, hashes, left), tier, group, last=True)
    parent = wire.parent_of(tag, fields)
    lora_name = wire.text_of(tag, fields, "lora_name")
    keys = get("extra_keys")
    salt = None
    if keys is not None:
        if not isinstance(keys, list):
            raise EngineEventError(f"{tag} with extra_keys {keys!r:.60}; expected an array or nil")
        ids_have_offsets = "type" in fields  # a map: 0.24 and later
        keys, salt = _split_extra_keys(keys, lora_name, parent is None, ids_have_offsets) if any(keys) else (None, None)
    kind = None if get("kv_cache_spec_kind") is None else wire.text_of(tag, fields, "kv_cache_spec_kind")
    ahead = _lookahead(tag, fields) if "lookahead_token_ids" in fields else ()
    adapted = get("lora_name") is not None or get("lora_id") is not None
    return EngineStored(
        hashes=hashes,
        parent=parent,
        token_ids=wire.tokens_of(tag, fields),
        block_size=wire.block_size_of(tag, fields),
        tier=tier,
        group=group,
        adapter=wire.adapter_of(tag, fields) if adapted else None,
        adapter_named=not adapted or wire.is_adapter_named(fields),
        salt=salt,
        extra_keys=keys,
        kind=None if kind is None else AttentionKind.of(kind),
        window_tokens=None if get("kv_cache_spec_sliding_window") is None else _window(tag, fields),
        lookahead_tokens=len(ahead),
        lookahead=ahead,
        offloaded=tier is not Tier.HBM,
        removal_told=_is_removal_told(fields),
        chunk_removal_told=get("medium") != "CPU" or "group_idx" in fields or "locality" in fields,
        maybe_again=parent is None and tier is Tier.HBM and "type" in fields,
        untold_keys="" if "extra_keys" in fields or "type" in fields else UNTOLD_KEYS,
    )


def _without_copies(tag: str, hashes: Sequence[EngineHash], left: Any) -> list[EngineHash]:
    """The hashes that have no copies left."""
    if not isinstance(left, list) or len(left) != len(hashes) or any(type(one) is not int or one < 0 for one in left):
        raise EngineEventError(f"{tag} with remaining_copy_counts {left!r:.60}; expected a count for each hash")
    return [name for name, copies in zip(hashes, left, strict=True) if not copies]


def _tier(tag: str, fields: wire.Fields) -> Tier:
    medium = fields.get("medium")
    if medium is None or medium == "GPU":
        tier = Tier.HBM
    elif medium in _SHARED_STORES:
        return Tier.OBJECT_STORE
    else:
        tier = parse_tier(medium)
    locality = fields.get("locality")
    if locality is None or locality == "LOCAL":
        return tier
    if locality != "REMOTE":
        kind = UnknownTier if isinstance(locality, str) else EngineEventError
        raise kind(f"{tag} with locality {locality!r:.60}; expected LOCAL or REMOTE")
    remote = _REMOTE_TIERS.get(tier)
    if remote is None:
        raise UnknownTier(f"{tag} with remote {tier.label}; no tier matches it")
    return remote


def _is_removal_told(fields: wire.Fields) -> bool:
    """True if an event will report the blocks' removal. A tier that names itself as owner reports it."""
    return fields.get("medium") in _TOLD_MEDIA or fields.get("ownership") is not None


def _group(tag: str, fields: wire.Fields) -> int:
    group = fields.get("group_idx")
    if group is None:
        return 0
    if type(group) is not int or not 0 <= group < MAX_GROUPS:
        raise EngineEventError(f"{tag} with group_idx {group!r:.60}; expected 0 to {MAX_GROUPS - 1} or nil")
    return group


def _window(tag: str, fields: wire.Fields) -> int | None:
    window = fields.get("kv_cache_spec_sliding_window")
    if window is not None and (type(window) is not int or window < 1):
        raise EngineEventError(f"{tag} with kv_cache_spec_sliding_window {window!r:.60}; expected tokens or nil")
    return window


def _lookahead(tag: str, fields: wire.Fields) -> Sequence[int]:
    """The tokens after the last block that are covered by the block's hash. `lookahead_token_ids` has one array of
    tokens per block."""
    ahead = fields.get("lookahead_token_ids")
    if not ahead and (ahead is None or isinstance(ahead, list)):
        return ()
    if (
        not isinstance(ahead, list)
        or any(not isinstance(tokens, (list, tuple)) for tokens in ahead)
        or len({len(tokens) for tokens in ahead}) > 1
        or len(ahead[-1]) > MAX_LOOKAHEAD
    ):
        raise EngineEventError(
            f"{tag} with lookahead_token_ids {ahead!r:.60}; expected arrays of one length, at most {MAX_LOOKAHEAD}"
        )
    return tuple(ahead[-1])


def _untagged(key: Any) -> Sequence[Any]:
    """Convert a tagged key to the form that events use. Other keys stay as they are."""
    if not isinstance(key, (list, tuple)) or len(key) < 2 or (key[0], type(key[1])) not in _TAGS:
        return (key,)
    if key[0] == "lora":
        return (key[1],)
    return (key[1:],) if key[0] == "mm" else (key[1],)


def _split_extra_keys(
    keys: Sequence[Any], lora_name: str | None, first_is_root: bool, ids_have_offsets: bool
) -> tuple[list[ExtraKeys] | None, str | None]:
    """Split an event's `extra_keys` into (canonical keys without salt, one entry per block; salt or None).

    vLLM writes the LoRA name, multimodal keys, the salt (only for the first block of a prompt), and the embedding digest, in
    this order. Text after the LoRA name in a prompt's first block is the salt. Versions that write events as arrays may also
    write a multimodal identifier as text, without its offset; so text in the form of a content hash is not taken for a salt.
    Tagged keys (0.33's own, `_TAGS`) are accepted too. Raises EngineEventError for keys of any other form.
    """
    salt: str | None = None
    canonical: list[ExtraKeys] = []
    plain = True
    for i, entry in enumerate(keys):
        if not entry:
            canonical.append(None)
            continue
        if not isinstance(entry, (list, tuple)):
            raise EngineEventError(f"extra keys of block {i} are {entry!r:.60}; expected an array or nil")
        rest = [one for key in entry for one in _untagged(key)]
        if lora_name is not None and rest[0] == lora_name:
            del rest[0]
        kept: list[Any] = []
        for key in rest:
            if (
                i == 0
                and first_is_root
                and isinstance(key, str)
                and (ids_have_offsets or not _CONTENT_HASH.search(key))
            ):
                if salt is not None:  # two texts: the earlier one was a multimodal identifier
                    kept.append(salt)
                salt = key
            elif isinstance(key, (list, tuple, str, bytes)):
                kept.append(list(key) if isinstance(key, (list, tuple)) else key)
            else:
                raise EngineEventError(f"extra key {key!r:.60} of block {i}; expected text, bytes or a pair")
        canonical.append(kept or None)
        plain = plain and not kept
    return (None if plain else canonical), salt
