"""SGLang's KV events, versions 0.4.7 to 0.5.23.

Hashes are signed 64-bit integers, used as they come. There are no groups and no extra keys; every event of a chain has its
salt. `AllBlocksCleared` is a reset of the whole cache: the device tier and the host's; the tiers behind them count as
cleared too, since the tree that names their blocks is gone. A shared pool (EXTERNAL) is evicted by others too, who don't say
so.
"""

from kvatlas.blocks.tiers import Tier, parse_tier
from kvatlas_publishers.engine_events import EngineBatch, EngineCleared, EngineEvent, EngineRemoved, EngineStored
from kvatlas_publishers.engines import payload as wire

_FIELDS = {
    "BlockStored": (
        "block_hashes",
        "parent_block_hash",
        "token_ids",
        "block_size",
        "lora_id",
        "medium",  # 0.5.9
        "cache_salt",  # 0.5.20
        "session_id",
        "lora_name",  # 0.5.22
    ),
    "BlockRemoved": ("block_hashes", "medium"),
    "AllBlocksCleared": (),
}


_ALL_TIERS = tuple(Tier)


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
    return EngineStored(
        hashes=hashes,
        parent=wire.parent_of(tag, fields),
        token_ids=wire.tokens_of(tag, fields),
        block_size=wire.block_size_of(tag, fields),
        tier=tier,
        adapter=wire.adapter_of(tag, fields),
        adapter_named=wire.is_adapter_named(fields),
        salt=wire.text_of(tag, fields, "cache_salt"),
        salt_inherited=False,
        offloaded=medium == "EXTERNAL",
        removal_told=medium != "EXTERNAL",
    )
