"""Which blocks the hashes of an engine's store stand for: told by its tokens, its parent and its namespace (pure)."""

from collections.abc import Iterator, Sequence

from kvatlas.blocks.hashing import extend_chain
from kvatlas.errors import InvalidValue
from kvatlas.events import EngineHash, EngineStored
from publishers.engines.extra_keys import with_root_salt
from publishers.ledger.counters import LedgerCounters
from publishers.ledger.lineage import Block, Lineages


class Placement:
    """Makes the blocks in the lineages, and keeps there what can't be placed before its parent is known."""

    def __init__(self, lineages: Lineages, counters: LedgerCounters) -> None:
        self._lineages = lineages
        self._counters = counters

    def place(self, event: EngineStored, block_size: int | None) -> list[Block] | None:
        """The blocks of the event's hashes, of an engine with blocks of this size; None (counted) where they can't be told."""
        hashes, lineages, counters = event.hashes, self._lineages, self._counters
        if not event.token_ids:
            counters.placeholder_unknown += sum(name not in lineages.known for name in hashes)
            return None
        if event.block_size != block_size:
            counters.other_block_size += len(hashes)
            return None
        if len(event.token_ids) != len(hashes) * event.block_size:
            counters.unindexable += len(hashes)
            return None
        keys = event.extra_keys
        parent: Block | None = None
        try:
            if event.parent is None:
                namespace = lineages.namespace(event.adapter, event.salt, event.block_size)
                if namespace.root_salt is not None:
                    keys = with_root_salt(keys, namespace.root_salt)
            else:
                parent = lineages.meant(event.parent, event)
                if parent is None:
                    if event.salt_inherited:  # else what is left of its copies then may be another salt's
                        lineages.unplaced.keep(event)
                    counters.unknown_parent += len(hashes)
                    return None
                namespace = parent.namespace
            above = None if parent is None else int.from_bytes(parent.sequence_hash, "little")
            packed = extend_chain(event.token_ids, event.block_size, above, keys)
        except InvalidValue:
            counters.unindexable += len(hashes)
            return None
        return lineages.chain(namespace, parent, packed)

    def place_behind(self, names: Sequence[EngineHash], block_size: int | None) -> Iterator[tuple[EngineHash, Block]]:
        """These hashes are known: what was stored behind them before belongs behind them, whatever is still held of it. Yields
        the hashes that became known by that, with their blocks."""
        lineages, found = self._lineages, list(names)
        for name in found:  # it grows
            for event in lineages.unplaced.take(name):
                chain = self.place(event, block_size)
                if chain is None:
                    continue
                for child, block in zip(event.hashes, chain, strict=True):
                    if child not in lineages.known:
                        lineages.known[child] = block
                        block.names += 1
                        found.append(child)
                        yield child, block
                lineages.drop(chain[-1])
