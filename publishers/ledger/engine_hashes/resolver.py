"""Resolves the hashes of a stored event to blocks, by its tokens, parent and namespace."""

from collections.abc import Iterator, Sequence

from kvatlas.blocks.hashing import HASH_BYTES, ExtraKeys, chain_of_local_hashes, extend_chain, lookahead_chain
from kvatlas.errors import InvalidValue
from kvatlas_publishers.engine_events import EngineHash, EngineStored
from kvatlas_publishers.ledger.block import Block, Stretch
from kvatlas_publishers.ledger.counters import LedgerCounters
from kvatlas_publishers.ledger.engine_hashes.awaiting_parent import AwaitingParent
from kvatlas_publishers.ledger.lineage import Lineage, Place


class BlockResolver:
    """Creates blocks in the lineage. Events with an unknown parent wait in `awaiting` until it is known.

    `block_size`: tokens of the engine's full blocks; None until known.
    """

    def __init__(self, lineage: Lineage, counters: LedgerCounters, block_size: int | None) -> None:
        self.block_size = block_size
        self.lookahead_tokens = 0
        """Number of tokens after a block that the engine's hashes cover."""
        self.awaiting = AwaitingParent()
        self.uses_keys = False
        """True if the engine has reported an adapter, a salt or extra keys. Then tokens alone don't identify an offloaded
        block."""
        self._lineage = lineage
        self._counters = counters

    def resolve(self, event: EngineStored) -> list[Block] | None:
        """The blocks of the event's hashes; None (counted) if they can't be identified."""
        place = self.locate(event)
        return None if place is None else self._lineage.extend(*place)

    def locate(self, event: EngineStored) -> Place | None:
        """The place of the event's blocks; None (counted) if it can't be determined."""
        hashes, lineage, counters = event.hashes, self._lineage, self._counters
        if event.sequence_hashes:
            return self._locate_sequence_hashes(event)
        local = event.local_hashes
        if (not event.token_ids and local is None) or (event.offloaded and self.uses_keys and not has_keys(event)):
            counters.placeholder_unknown += sum(name not in lineage.known for name in hashes)
            return None
        if event.block_size != self.block_size:
            counters.other_block_size += len(hashes)
            return None
        told = len(event.token_ids) if local is None else len(local.hashes) * event.block_size
        if told != len(hashes) * event.block_size:
            counters.unindexable += len(hashes)
            return None
        if not len(event.lookahead) == event.lookahead_tokens == self.lookahead_tokens:
            # the event does not identify which of the blocks with these tokens it is
            counters.unindexable += len(hashes)
            return None
        keys, tokens = event.extra_keys, event.token_ids
        above: int | None = None
        parent: Stretch | None = None
        try:
            if event.lookahead_tokens:
                above, tokens = lookahead_chain([*tokens, *event.lookahead], event.lookahead_tokens)
            if event.parent is None:
                namespace = lineage.namespace(event.adapter, event.salt, event.block_size, event.chain)
                above = above if local is None else local.root
                if namespace.root_salt is not None:
                    keys = with_root_salt(keys, namespace.root_salt)
            else:
                parent = lineage.find_parent(event)
                if parent is None:
                    # otherwise the copies left when the parent becomes known may belong to another salt
                    if event.salt_inherited and not event.offloaded:
                        self.awaiting.keep(event)
                    counters.unknown_parent += len(hashes)
                    counters.zero_parent += len(hashes) if event.parent == 0 else 0
                    return None
                namespace = parent.namespace
                above = int.from_bytes(parent.hashes[-HASH_BYTES:], "little")
            if local is None:
                packed = extend_chain(tokens, event.block_size, above, keys)
            else:
                packed = chain_of_local_hashes(local.hashes, above)
        except InvalidValue:
            counters.unindexable += len(hashes)
            return None
        if event.block_bytes:
            lineage.tell_block_bytes(namespace, event.tier, event.block_bytes)
        return Place(namespace, parent, packed)

    def _locate_sequence_hashes(self, event: EngineStored) -> Place | None:
        """The place of sequence hashes that another publisher computed."""
        count = len(event.hashes)
        if event.block_size != self.block_size or len(event.sequence_hashes) != count * HASH_BYTES:
            self._counters.other_block_size += count
            return None
        parent = self._lineage.find_parent(event)
        if parent is None and event.parent is not None:
            self.awaiting.keep(event)
            self._counters.unknown_parent += count
            return None
        if parent is not None:
            return Place(parent.namespace, parent, event.sequence_hashes)
        try:
            namespace = self._lineage.namespace(event.adapter, event.salt, event.block_size)
        except InvalidValue:
            self._counters.unindexable += count
            return None
        return Place(namespace, None, event.sequence_hashes)

    def resolve_awaiting(self, names: Sequence[EngineHash]) -> Iterator[tuple[EngineHash, Block, EngineHash | None]]:
        """Resolve the events that were waiting for these hashes, which have become known, even if their blocks are no
        longer held. Yields the hashes that became known this way, with their blocks and the hashes before them."""
        lineage, parents = self._lineage, list(names)
        for name in parents:  # grows during the loop
            for event in self.awaiting.take(name):
                blocks = self.resolve(event)
                if blocks is None:
                    continue
                for before, child, block in zip((event.parent, *event.hashes), event.hashes, blocks, strict=False):
                    if child not in lineage.known:
                        lineage.add_name(child, block)
                        self._counters.parents_found += 1
                        parents.append(child)
                        yield child, block, before
                lineage.drop(blocks[-1])


def has_keys(event: EngineStored) -> bool:
    """True if the event has keys besides its tokens."""
    return event.adapter is not None or event.salt is not None or event.extra_keys is not None


def with_root_salt(keys: Sequence[ExtraKeys] | None, salt: str | None) -> Sequence[ExtraKeys] | None:
    """The keys, with `salt` inserted at its canonical place among those of the first block."""
    if salt is None:
        return keys
    first = list((keys[0] if keys else None) or ())
    at = next((i for i, key in enumerate(first) if isinstance(key, bytes)), len(first))
    first.insert(at, salt)
    return [first, *(keys[1:] if keys else ())]
