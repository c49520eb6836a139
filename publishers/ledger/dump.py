"""The ledger as bytes, for the saved state: versioned msgpack with packed blocks.

    [version, identity, block size, namespaces, names, owners, evicted, holdings, shared, awaiting, variants, groups, lookahead
     tokens, unproven, small blocks, untold keys, reports, bytes by tier]

`identity`: the settings that sequence hashes depend on; a ledger saved with other settings is refused. `namespaces`: [adapter,
salt, packed sequence hashes, packed u32 parents (position in the namespace + 1, or 0 at a root), chain, bytes per block in the
device tier, from events].
`owners`: for each name, the position of its block over all namespaces, packed u32. `holdings`: [tier, group, indexable, names,
counts]. `shared`: [name, [[position of block, [[position of holding, count]]]]]. `awaiting`: [hashes, parent, packed tokens,
adapter, salt, extra keys, lookahead, local hashes or nil, chain, packed sequence hashes]. `variants`: [hash, the parent's
hash that it hangs on]. `groups`: [index, kind, window tokens, block size]. `unproven`: see `Residency.unproven`; nil if the
engine uses keys. `small blocks`: [parts of a block, [[hash, anchor, number]]], see `marks.small_blocks`. `untold keys`: keys of
blocks that the engine's events omit; `reports`: see `HitReports.dump`; `bytes by tier`: for each namespace, [tier, bytes per
block] from events. Usable residency and marks are not saved: they are computed from
the rest.
"""

import sys
from array import array
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgpack

from kvatlas.blocks.hashing import HASH_BYTES, pack_tokens
from kvatlas.blocks.kv_cache_groups import AttentionKind
from kvatlas.blocks.tiers import Tier
from kvatlas.errors import InvalidValue
from kvatlas_publishers.engine_events import EngineHash, EngineStored, LocalHashes
from kvatlas_publishers.ledger.block import Block, Stretch
from kvatlas_publishers.ledger.engine_groups import EngineGroups, ToldGroup
from kvatlas_publishers.ledger.engine_hashes.awaiting_parent import AwaitingParent
from kvatlas_publishers.ledger.engine_hashes.shared_hashes import CertainCopies
from kvatlas_publishers.ledger.holdings import Holding
from kvatlas_publishers.ledger.lineage import Lineage, Place
from kvatlas_publishers.ledger.residency import Residency

VERSION = 7


@dataclass(frozen=True, slots=True)
class SavedHolding:
    """One holding's counts."""

    tier: Tier
    group: int
    indexable: bool
    counts: dict[EngineHash, int]


@dataclass(frozen=True, slots=True)
class SavedCopies:
    """Copies of a shared hash that certainly belong to one block, as (position of the holding, count)."""

    block: int
    counts: list[tuple[int, int]]


@dataclass(frozen=True)
class SavedLedger:
    """A dump, decoded and checked for its shape."""

    block_size: int | None
    namespaces: list[tuple[str | None, str | None, bytes, list[int], str, int]]
    names: list[EngineHash]
    owners: list[int]
    evicted: list[EngineHash]
    holdings: list[SavedHolding]
    shared: list[tuple[EngineHash, list[SavedCopies]]]
    awaiting: list[EngineStored]
    variants: list[tuple[EngineHash, EngineHash]]
    groups: dict[int, ToldGroup]
    lookahead_tokens: int
    unproven: list[EngineHash] | None
    parts: int
    small_blocks: list[tuple[EngineHash, EngineHash, int]]
    untold_keys: str
    reports: list[Any]
    tier_bytes: list[list[tuple[Tier, int]]]

    def restore(self, lineage: Lineage, residency: Residency, awaiting: AwaitingParent) -> None:
        """Fill the empty parts of a ledger that already knows the groups. Raises InvalidValue, LookupError, TypeError or
        ValueError if the dump contradicts itself."""
        holdings = [residency.add_holding(saved.tier, saved.group) for saved in self.holdings]
        for holding, saved in zip(holdings, self.holdings, strict=True):
            holding.counts.update(saved.counts)
        blocks = self._restore_lineage(lineage, residency)
        for event in self.awaiting:
            awaiting.keep(event)
        for name, copies in self.shared:
            by_block = {
                Block(blocks[one.block]): CertainCopies({holdings[at]: count for at, count in one.counts})
                for one in copies
            }
            residency.shared.restore(name, by_block)
        if self.parts == residency.sparse.small.parts:
            for part, anchor, number in self.small_blocks:
                residency.sparse.small.restore(part, anchor, number)
        for name, block in lineage.known.items():
            if not block.plain and name not in residency.shared.by_hash:
                residency.enter_tiers(name, Block(block))

    def _restore_lineage(self, lineage: Lineage, residency: Residency) -> list[Stretch]:
        """Make the blocks and their names, and the copies of plain ones. Returns the stretch of each block, in the dump's
        order."""
        copies_of = self._plain_copies(residency)
        blocks: list[Stretch] = []
        start = 0
        for (adapter, salt, packed, parents, chain, block_bytes), tier_bytes in zip(
            self.namespaces, self.tier_bytes, strict=True
        ):
            namespace = lineage.namespace(adapter, salt, self.block_size or 1, chain)
            for tier, size in ([(Tier.HBM, block_bytes)] if block_bytes else []) + tier_bytes:
                lineage.tell_block_bytes(namespace, tier, size)
            branches = {parent for at, parent in enumerate(parents) if parent != at}
            first = 0
            for end in range(1, len(parents) + 1):
                copies = copies_of.get(start + first)
                if (
                    end < len(parents)
                    and parents[end] == end
                    and end not in branches
                    and copies == copies_of.get(start + end)
                ):
                    continue  # same stretch: it follows the block before it and is like it
                position = parents[first]
                if position > first:
                    raise InvalidValue(f"saved block {first} comes before its parent {position - 1}")
                parent = blocks[start + position - 1] if position else None
                hashes = packed[first * HASH_BYTES : end * HASH_BYTES]
                if copies is None:
                    blocks += lineage.extend(namespace, parent, hashes)
                else:
                    names = [self._name_at[at] for at in range(start + first, start + end)]
                    for stretch in residency.restore_plain(Place(namespace, parent, hashes), names, copies):
                        blocks += [stretch] * len(stretch)
                first = end
            start += len(parents)
        for name, position in zip(self.names, self.owners, strict=True):
            block = blocks[position]
            if not block.plain:
                lineage.add_name(name, Block(block))
        if self.variants:
            lineage.variants.restore(self.variants)
        lineage.mark_evicted(self.evicted)
        return blocks

    @cached_property
    def _name_at(self) -> dict[int, EngineHash]:
        """The latest name of each block that has one, by position."""
        return dict(zip(self.owners, self.names, strict=True))

    def _plain_copies(self, residency: Residency) -> dict[int, int]:
        """Number of copies of each block that may be in a plain stretch, by position."""
        names = set(self.names)
        if len(names) < len(self.names):
            raise InvalidValue("a saved hash stands for two blocks and is not shared")
        names.difference_update(name for name, _ in self.shared)
        for link in self.variants:
            names.difference_update(link)
        evicted = set(self.evicted)
        positions: Counter[int] = Counter(self.owners)
        positions.update(one.block for _, copies in self.shared for one in copies)
        found: dict[int, int] = {}
        for position, name in self._name_at.items():
            if positions[position] == 1 and name in names:
                copies = residency.plain_copies(name)
                if copies or (copies == 0 and name in evicted):
                    found[position] = copies
        return found


def pack(
    identity: list[Any],
    block_size: int | None,
    groups: EngineGroups,
    lineage: Lineage,
    residency: Residency,
    awaiting: AwaitingParent,
    reports: list[Any],
    *,
    uses_keys: bool,
) -> bytes:
    """Build the dump."""
    namespaces: list[list[Any]] = []
    tier_bytes: list[list[list[int]]] = []
    position_of: dict[Stretch, int] = {}
    start = 0
    for namespace in lineage.namespaces.values():
        parents = array("I")
        hashes: list[bytes] = []
        for stretch in namespace.stretches():
            before = stretch.parent
            position_of[stretch] = start + len(parents)
            parents.append(0 if before is None else position_of[before] - start + len(before))
            parents.extend(range(len(parents), len(parents) + len(stretch) - 1))
            hashes.append(stretch.hashes)
        start += len(parents)
        told = lineage.block_bytes.told(namespace.scope_id)
        where = [namespace.chain, told.get(Tier.HBM, 0)]
        tier_bytes.append([[int(tier), size] for tier, size in told.items() if tier is not Tier.HBM])
        namespaces.append([namespace.adapter, namespace.salt, b"".join(hashes), _little_endian(parents), *where])
    holdings = residency.holdings.by_group.values()
    order: dict[Holding, int] = {holding: i for i, holding in enumerate(holdings)}
    counts: dict[Holding, dict[EngineHash, int]] = {holding: dict(holding.counts) for holding in holdings}
    for holding, name in residency.resident():
        counts[holding].setdefault(name, 1)
    shared = [
        [
            name,
            [
                [position_of[block], [[order[holding], count] for holding, count in certain.by_holding.items()]]
                for block, certain in by_block.items()
            ],
        ]
        for name, by_block in residency.shared.by_hash.items()
    ]
    small = residency.sparse.small
    names = {**lineage.known, **lineage.variants.detached}
    owners = array(
        "I",
        [position_of[stretch] + (stretch.names.index(name) if stretch.plain else 0) for name, stretch in names.items()],
    )
    return bytes(
        msgpack.packb(
            [
                VERSION,
                identity,
                block_size,
                namespaces,
                list(names),
                _little_endian(owners),
                list(lineage.evicted),
                [
                    [int(one.tier), one.group, one.indexable, list(some), list(some.values())]
                    for one, some in counts.items()
                ],
                shared,
                [
                    [
                        list(one.hashes),
                        one.parent,
                        pack_tokens(one.token_ids),
                        one.adapter,
                        one.salt,
                        one.extra_keys,
                        list(one.lookahead),
                        None if one.local_hashes is None else list(one.local_hashes.hashes),
                        one.chain,
                        one.sequence_hashes,
                    ]
                    for one in awaiting
                ],
                list(lineage.variants.parent_of.items()),
                [[index, one.kind.value, one.window_tokens, one.block_size] for index, one in groups.told.items()],
                groups.lookahead_tokens,
                None if uses_keys else list(residency.unproven),
                [small.parts, [[part, *one] for part, tied in small.tied.items() for one in tied.items()]],
                groups.untold_keys,
                reports,
                tier_bytes,
            ]
        )
    )


def unpack(dumped: bytes, identity: list[Any]) -> SavedLedger:
    """The inverse of `pack`. Raises InvalidValue for other bytes, another version, or other settings."""
    try:
        raw = msgpack.unpackb(dumped)
        version, *fields = raw if isinstance(raw, list) and raw else [raw]
        if version != VERSION:
            raise InvalidValue(f"saved ledger of version {version!r:.40}; expected {VERSION}")
        saved_identity, block_size, namespaces, names, owners, evicted, holdings, shared, awaiting, *engine = fields
        variants, told, ahead, unproven, (parts, small_blocks), untold_keys, reports, tier_bytes = engine
        if saved_identity != identity:
            raise InvalidValue(f"ledger was saved for {saved_identity!r:.200}; expected {identity!r:.200}")
        saved = SavedLedger(
            block_size=block_size,
            namespaces=[
                (adapter, salt, packed, _integers(parents), chain, block_bytes)
                for adapter, salt, packed, parents, chain, block_bytes in namespaces
            ],
            names=names,
            owners=_integers(owners),
            evicted=evicted,
            holdings=[
                SavedHolding(Tier(tier), group, indexable, dict(zip(held, counts, strict=True)))
                for tier, group, indexable, held, counts in holdings
            ],
            shared=[
                (name, [SavedCopies(at, [(holding, count) for holding, count in counts]) for at, counts in by_block])
                for name, by_block in shared
            ],
            awaiting=[
                EngineStored(
                    hashes,
                    parent,
                    _integers(tokens),
                    block_size,
                    adapter=adapter,
                    salt=salt,
                    extra_keys=keys,
                    lookahead_tokens=len(lookahead),
                    lookahead=lookahead,
                    local_hashes=None if local is None else LocalHashes(local, chain),
                    sequence_hashes=bytes(sequence),
                )
                for hashes, parent, tokens, adapter, salt, keys, lookahead, local, chain, sequence in awaiting
            ],
            variants=[(name, parent_name) for name, parent_name in variants],
            groups={index: ToldGroup(AttentionKind(kind), window, size) for index, kind, window, size in told},
            lookahead_tokens=ahead,
            unproven=unproven,
            parts=parts,
            small_blocks=[(part, anchor, number) for part, anchor, number in small_blocks],
            untold_keys=untold_keys,
            reports=reports,
            tier_bytes=[[(Tier(tier), size) for tier, size in one] for one in tier_bytes],
        )
    except InvalidValue:
        raise
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise InvalidValue(f"not a saved ledger: {error}") from error
    return saved


def _little_endian(values: "array[int]") -> bytes:
    if sys.byteorder == "big":
        values.byteswap()
    return values.tobytes()


def _integers(packed: bytes) -> list[int]:
    values = array("I", packed)
    if sys.byteorder == "big":
        values.byteswap()
    return values.tolist()
