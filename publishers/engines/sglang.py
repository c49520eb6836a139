"""SGLang's KV events, versions 0.5.7 to 0.5.23. Earlier versions are recognized, but blocks that their events don't prove are
not published.

Hashes are signed 64-bit integers, used unchanged. There are no groups and no extra keys; every event of a chain has its salt.
`AllBlocksCleared` resets the whole cache: both the device tier and the host tier. Farther tiers count as cleared too, since
the tree that names their blocks is gone. From a shared pool (EXTERNAL), other engines evict blocks too, and no event reports
that.

- Up to 0.5.5 a block's hash covers only its own tokens (Python's `hash`), and blocks below another node of the tree look like
  roots, so their place in the prompt is unknown. Since 0.5.6 hashes are SHA-256 chains, which lets us check roots.
- 0.5.6 reports the removal of a node that it splits but still holds.
- Since 0.5.9 events name a medium, so no check is needed.
- The tree separates prompts by `extra_key` and by adapter. No event has the extra key, events before 0.5.22 have no adapter,
  and hashes cover neither. Such blocks look plain.
- The salt is in `metadata` in 0.5.18 and 0.5.19, in `cache_salt` later, and part of the extra key before.
"""

import hashlib
import re
import sys
from array import array
from collections.abc import Sequence
from itertools import chain

from kvatlas.blocks.tiers import Tier, parse_tier
from kvatlas_publishers.engine_events import (
    EngineBatch,
    EngineCleared,
    EngineEvent,
    EngineHash,
    EngineRemoved,
    EngineStored,
)
from kvatlas_publishers.engines import payload as wire

_FIELDS = {
    "BlockStored": (
        "block_hashes",
        "parent_block_hash",
        "token_ids",
        "block_size",
        "lora_id",
        "medium",  # 0.5.9
        "metadata",  # 0.5.18 and 0.5.19; maps have cache_salt instead
        "session_id",
        "lora_name",  # 0.5.22
    ),
    "BlockRemoved": ("block_hashes", "medium"),
    "AllBlocksCleared": (),
}


_ALL_TIERS = tuple(Tier)
UNTOLD_KEYS = "SGLang's events don't have the extra keys of requests (nor, before 0.5.22, their adapters)"
_NO_PAGE = 5_740_354_900_026_072_187
"""Python's hash of an empty sequence of tokens, which is the parent of roots in the first versions."""
LEAST_VERSION = (0, 5, 7)
"""The first version whose events report reliably which blocks it holds, and where."""


def is_too_old(version: str) -> bool:
    """True if this SGLang version is below LEAST_VERSION. False for text that is not a version."""
    numbers = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    return numbers is not None and tuple(map(int, numbers.groups())) < LEAST_VERSION


def decode_batch(payload: bytes) -> EngineBatch:
    """Decode one ZMQ payload. Raises EngineEventError if it is not a batch."""
    return wire.decode(payload, _FIELDS, _event)


def _event(tag: str, fields: wire.Fields) -> EngineEvent:
    if tag == "AllBlocksCleared":
        return EngineCleared(_ALL_TIERS)
    medium = fields.get("medium")
    tier = Tier.HBM if medium is None else parse_tier(medium)
    hashes = wire.hashes_of(tag, fields)
    if tag == "BlockRemoved":
        return EngineRemoved(hashes, tier)
    tokens, ahead = wire.tokens_of_pairs(tag, fields)
    parent, block_size = wire.parent_of(tag, fields), wire.block_size_of(tag, fields)
    early = "medium" not in fields and "type" not in fields
    return EngineStored(
        hashes=hashes,
        parent=parent,
        token_ids=tokens,
        block_size=block_size,
        tier=tier,
        adapter=wire.adapter_of(tag, fields),
        adapter_named=wire.is_adapter_named(fields),
        salt=_salt(tag, fields),
        salt_inherited=False,
        lookahead_tokens=len(ahead),
        lookahead=ahead,
        offloaded=medium == "EXTERNAL",
        removal_told=medium != "EXTERNAL",
        untold_keys=UNTOLD_KEYS,
        located=not early or _is_located(hashes, parent, [*tokens, *ahead], block_size, pairs=bool(ahead)),
        removes_held=early,
    )


def _salt(tag: str, fields: wire.Fields) -> str | None:
    metadata = fields.get("metadata")
    return wire.text_of(tag, metadata if isinstance(metadata, dict) else fields, "cache_salt")


def _is_located(
    hashes: Sequence[EngineHash], parent: EngineHash | None, tokens: Sequence[int], block_size: int, *, pairs: bool
) -> bool:
    """False if the event claims to start at a prompt's first page, but its first hash is not that page's (0.5.6 and later):
    SHA-256 of the tokens as 32-bit integers (of pairs: both tokens), its first 64 bits, signed."""
    if parent is not None:
        return parent != _NO_PAGE
    page = tokens[:block_size]
    if pairs:
        page = list(chain.from_iterable(zip(page, tokens[1 : block_size + 1], strict=False)))
    try:
        packed = array("I", page)
    except (OverflowError, TypeError):
        return True  # the ledger leaves such tokens out
    if sys.byteorder == "big":
        packed.byteswap()
    digest = hashlib.sha256(packed.tobytes()).digest()
    return not hashes or hashes[0] == int.from_bytes(digest[:8], "big", signed=True)
