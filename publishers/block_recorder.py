"""Records blocks one call at a time, from engine events or token ids."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from hashlib import blake2b

from kvatlas.blocks.hashing import HASH_BYTES, ExtraKeys, extend_chain
from kvatlas.blocks.tiers import Tier, parse_tier
from kvatlas.errors import InvalidValue
from kvatlas_publishers.engine_events import EngineBatch, EngineCleared, EngineHash, EngineRemoved, EngineStored
from kvatlas_publishers.settings import PublisherSettings

NAMESPACE_BYTES = 8
NAME_BYTES = NAMESPACE_BYTES + HASH_BYTES


class BlockRecorder(ABC):
    """Adds `stored`, `removed` and `cleared` to a publisher that records batches."""

    settings: PublisherSettings

    @abstractmethod
    def record(self, batch: EngineBatch) -> None:
        """Record an engine's batch."""

    async def stored(
        self,
        what: EngineStored | Sequence[int],
        *,
        parent: EngineHash | None = None,
        block_size: int | None = None,
        tier: Tier | str = Tier.HBM,
        adapter: str | None = None,
        salt: str | None = None,
        extra_keys: Sequence[ExtraKeys] | None = None,
    ) -> Sequence[EngineHash]:
        """Record stored blocks: an engine's event, or token ids and their scope. Returns the blocks' names.

        With token ids, the names are created here, for use as `parent` in later calls and in `removed`; `parent` is the name
        of the block before the first, and only full blocks are stored. Raises InvalidValue for token ids that can't be hashed,
        for a parent that is not such a name, or if the block size is not known.
        """
        if not isinstance(what, EngineStored):
            size = block_size or self.settings.block_size
            if size is None:
                raise InvalidValue("token ids without a block size; expected block_size here or in the settings")
            names = block_names(what, size, parent, adapter, salt, extra_keys)
            what = EngineStored(
                hashes=names,
                parent=parent,
                token_ids=what[: len(names) * size],
                block_size=size,
                tier=_tier(tier),
                adapter=adapter,
                salt=salt,
                extra_keys=extra_keys,
            )
        self.record(EngineBatch([what]))
        return what.hashes

    async def removed(self, what: EngineRemoved | Sequence[EngineHash], *, tier: Tier | str = Tier.HBM) -> None:
        """Record that one copy of each block is gone: an engine's event, or the blocks' names, child first."""
        self.record(EngineBatch([what if isinstance(what, EngineRemoved) else EngineRemoved(what, _tier(tier))]))

    async def cleared(self, what: EngineCleared | None = None, *, tiers: Sequence[Tier | str] = (Tier.HBM,)) -> None:
        """Record that all blocks of the tiers are gone."""
        self.record(EngineBatch([what or EngineCleared(tuple(_tier(tier) for tier in tiers))]))


def _tier(tier: Tier | str) -> Tier:
    return tier if isinstance(tier, Tier) else parse_tier(tier)


def block_names(
    token_ids: Sequence[int],
    block_size: int,
    parent: EngineHash | None = None,
    adapter: str | None = None,
    salt: str | None = None,
    extra_keys: Sequence[ExtraKeys] | None = None,
) -> list[EngineHash]:
    """Names of the full blocks: 8 bytes for the adapter and the salt, 8 for the chain.

    Raises InvalidValue for token ids that can't be hashed, and if `parent` is not a name for this adapter and salt.
    """
    namespace = blake2b(repr((adapter, salt)).encode(), digest_size=NAMESPACE_BYTES).digest()
    above: int | None = None
    if parent is not None:
        if not isinstance(parent, bytes) or len(parent) != NAME_BYTES or not parent.startswith(namespace):
            raise InvalidValue(
                f"parent {parent!r:.60}; expected a name that `stored` returned for the same adapter and salt"
            )
        above = int.from_bytes(parent[NAMESPACE_BYTES:], "little")
    packed = extend_chain(token_ids, block_size, above, extra_keys)
    return [namespace + packed[at : at + HASH_BYTES] for at in range(0, len(packed), HASH_BYTES)]
