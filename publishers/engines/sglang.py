"""SGLang's KV events, versions 0.5.7 to 0.5.23; earlier ones are recognised, and what can't be known of them is not claimed.

Hashes are signed 64-bit integers, used as they come. There are no groups and no extra keys; every event of a chain has its
salt. `AllBlocksCleared` is a reset of the whole cache: the device tier and the host's; the tiers behind them count as
cleared too, since the tree that names their blocks is gone. A shared pool (EXTERNAL) is evicted by others too, who don't say
so.

- Up to 0.5.5 a block's hash is that of its own tokens (Python's `hash`), and what hangs on another node of the tree looks like
  a root: where in a prompt such a block is can't be known. From 0.5.6 on hashes are SHA-256 chains, by which roots are checked.
- 0.5.6 announces the removal of a node that it splits, and holds on to it.
- From 0.5.9 on events name a medium, so no check is needed there.
- The tree keeps prompts with an `extra_key` apart, and so it does adapters: no event has the former, none before 0.5.22 the
  latter, and hashes cover neither. Such blocks look plain.
- The salt: 0.5.18 and 0.5.19 have it in `metadata`, later ones as `cache_salt`; before, it is a part of the extra key.
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
"""Python's hash of no tokens: the parent of roots in the first versions."""
LEAST_VERSION = (0, 5, 7)
"""The first whose events say what it holds, and where."""


def is_too_old(version: str) -> bool:
    """Is this SGLang's version before the least one? False for a text that is no version."""
    numbers = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    return numbers is not None and tuple(map(int, numbers.groups())) < LEAST_VERSION


def decode_batch(payload: bytes) -> EngineBatch:
    """One ZMQ payload. Raises EngineEventError for one that is no batch."""
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
    """Is the first hash that of a prompt's first page, if it is said to be one (0.5.6 and later)? SHA-256 of its tokens as 32
    bits, of both tokens of each pair; the first 64 bits of it, signed."""
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
