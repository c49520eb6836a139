"""The ledger as bytes, for the saved state: msgpack, versioned, blocks packed.

    [version, identity, block size, namespaces, names, owners, evicted, holdings, shared, awaiting, variants, groups, lookahead
     tokens, unproven]

`identity` is what the sequence hashes depend on: a ledger saved under other settings is refused. `namespaces`: [adapter,
salt, packed sequence hashes, packed u32 parents: position in the namespace + 1, or 0 at a root]. `owners`: for each name the
position of its block over all namespaces, packed u32. `holdings`: [tier, group, indexable, names, counts]. `shared`:
[name, [[position of block, [[position of holding, count]]]]]. `awaiting`: [hashes, parent, packed tokens, adapter, salt, extra
keys]. `variants`: [hash, the parent's hash that it hangs on]. `groups`: [index, kind, window tokens, block size]. `unproven`:
see `Residency.unproven`; nil if the engine uses keys. Usable residency and marks are not saved: they are computed from the
rest. Versions 2 and 3 had no groups, version 2 no variants; they are read if all holdings are indexable. Up to version 5 what
is unproven was not saved: the engine is taken to use keys.
"""

import sys
from array import array
from dataclasses import dataclass
from typing import Any

import msgpack

from kvatlas.blocks.attention_groups import AttentionKind
from kvatlas.blocks.hashing import HASH_BYTES, pack_tokens
from kvatlas.blocks.tiers import Tier
from kvatlas.errors import InvalidValue
from kvatlas.events import EngineHash, EngineStored
from publishers.ledger.awaiting_parent import AwaitingParent
from publishers.ledger.block import Block
from publishers.ledger.engine_groups import EngineGroups, ToldGroup
from publishers.ledger.holdings import Holding
from publishers.ledger.lineage import Lineage
from publishers.ledger.residency import Residency
from publishers.ledger.shared_hashes import CertainCopies

VERSION = 6
WITHOUT_VARIANTS, WITHOUT_GROUPS, WITHOUT_LOOKAHEAD, WITHOUT_UNPROVEN = 2, 3, 4, 5
"""The versions before."""


@dataclass(frozen=True, slots=True)
class SavedHolding:
    """One holding's counts."""

    tier: Tier
    group: int
    indexable: bool
    counts: dict[EngineHash, int]


@dataclass(frozen=True, slots=True)
class SavedCopies:
    """What is certainly one block's of a shared hash: (position of the holding, count)."""

    block: int
    counts: list[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class SavedLedger:
    """A dump, decoded and checked for its shape."""

    block_size: int | None
    namespaces: list[tuple[str | None, str | None, bytes, list[int]]]
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

    def restore(self, lineage: Lineage, residency: Residency, awaiting: AwaitingParent) -> None:
        """Fill the empty parts of a ledger that knows the groups already. Raises InvalidValue, LookupError, TypeError or
        ValueError if it contradicts itself."""
        holdings = [residency.add_holding(saved.tier, saved.group) for saved in self.holdings]
        for holding, saved in zip(holdings, self.holdings, strict=True):
            holding.counts.update(saved.counts)
        blocks = self._restore_lineage(lineage)
        for event in self.awaiting:
            awaiting.keep(event)
        for name, copies in self.shared:
            by_block = {
                blocks[one.block]: CertainCopies({holdings[at]: count for at, count in one.counts}) for one in copies
            }
            residency.shared.restore(name, by_block)
        for name, block in lineage.known.items():
            if name not in residency.shared.by_hash:
                residency.enter_tiers(name, block)

    def _restore_lineage(self, lineage: Lineage) -> list[Block]:
        """Make the blocks and their names. Returns the blocks, in the dump's order."""
        blocks: list[Block] = []
        for adapter, salt, packed, parents in self.namespaces:
            namespace = lineage.namespace(adapter, salt, self.block_size or 1)
            mine: list[Block] = []
            first = 0
            for end in range(1, len(parents) + 1):
                if end < len(parents) and parents[end] == end:
                    continue  # it follows the block before it
                position = parents[first]
                if position > first:
                    raise InvalidValue(f"saved block {first} comes before its parent {position - 1}")
                parent = mine[position - 1] if position else None
                mine += lineage.extend(namespace, parent, packed[first * HASH_BYTES : end * HASH_BYTES])
                first = end
            blocks += mine
        for name, position in zip(self.names, self.owners, strict=True):
            lineage.add_name(name, blocks[position])
        if self.variants:
            lineage.variants.restore(self.variants)
        lineage.mark_evicted(self.evicted)
        return blocks


def pack(
    identity: list[Any],
    block_size: int | None,
    groups: EngineGroups,
    lineage: Lineage,
    residency: Residency,
    awaiting: AwaitingParent,
    *,
    uses_keys: bool,
) -> bytes:
    """The dump."""
    namespaces: list[list[Any]] = []
    position_of: dict[Block, int] = {}
    for namespace in lineage.namespaces.values():
        start = len(position_of)
        parents = array("I")
        hashes: list[bytes] = []
        for block in namespace.blocks():
            hashes.append(block.sequence_hash)
            parents.append(0 if block.parent is None else position_of[block.parent] - start + 1)
            position_of[block] = len(position_of)
        namespaces.append([namespace.adapter, namespace.salt, b"".join(hashes), _little_endian(parents)])
    holdings = residency.holdings.by_group.values()
    order: dict[Holding, int] = {holding: i for i, holding in enumerate(holdings)}
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
    names = {**lineage.known, **lineage.variants.detached}
    owners = array("I", [position_of[block] for block in names.values()])
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
                    [int(one.tier), one.group, one.indexable, list(one.counts), list(one.counts.values())]
                    for one in holdings
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
                    ]
                    for one in awaiting
                ],
                list(lineage.variants.parent_of.items()),
                [[index, one.kind.value, one.window_tokens, one.block_size] for index, one in groups.told.items()],
                groups.lookahead_tokens,
                None if uses_keys else list(residency.unproven),
            ]
        )
    )


def unpack(dumped: bytes, identity: list[Any]) -> SavedLedger:
    """The inverse of `pack`. Raises InvalidValue for other bytes, another version, or other settings."""
    try:
        raw = msgpack.unpackb(dumped)
        version = raw[0] if isinstance(raw, list) and raw else raw
        if version == WITHOUT_VARIANTS:
            raw.append([])
        if version in (WITHOUT_VARIANTS, WITHOUT_GROUPS):
            raw += [[], 0]
        if version in (WITHOUT_VARIANTS, WITHOUT_GROUPS, WITHOUT_LOOKAHEAD, WITHOUT_UNPROVEN):
            raw.append(None)
        elif version != VERSION:
            raise InvalidValue(f"saved ledger of version {version!r:.40}")
        _, saved_identity, block_size, namespaces, names, owners, evicted, holdings, shared, awaiting, *engine = raw
        variants, told, ahead, unproven = engine
        if version in (WITHOUT_VARIANTS, WITHOUT_GROUPS, WITHOUT_LOOKAHEAD) and ahead:
            raise InvalidValue(
                "saved ledger with lookahead hashes, of a version that left their tokens out of its hashes"
            )
        if version in (WITHOUT_VARIANTS, WITHOUT_GROUPS) and not all(indexable for _, _, indexable, _, _ in holdings):
            raise InvalidValue("saved ledger of a hybrid model, of a version that did not know its groups")
        if saved_identity != identity:
            raise InvalidValue(f"ledger was saved for {saved_identity!r:.200}; expected {identity!r:.200}")
        saved = SavedLedger(
            block_size=block_size,
            namespaces=[(adapter, salt, packed, _integers(parents)) for adapter, salt, packed, parents in namespaces],
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
                    lookahead_tokens=len(lookahead[0]) if lookahead else 0,
                    lookahead=lookahead[0] if lookahead else (),
                )
                for hashes, parent, tokens, adapter, salt, keys, *lookahead in awaiting
            ],
            variants=[(name, parent_name) for name, parent_name in variants],
            groups={index: ToldGroup(AttentionKind(kind), window, size) for index, kind, window, size in told},
            lookahead_tokens=ahead,
            unproven=unproven,
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
