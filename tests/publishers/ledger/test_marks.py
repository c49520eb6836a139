"""Marks that are updated batch by batch equal those computed from scratch, on random trees of blocks."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from kvatlas.blocks.kv_cache_groups import AttentionGroup, AttentionKind, ResumptionRule
from kvatlas.blocks.tiers import Tier
from kvatlas_publishers.ledger.block import Namespace, Stretch
from kvatlas_publishers.ledger.marks.marks import SEGMENT, MarkChange, Marks
from tests.publishers.naive_reuse import Group, allows

FULL = AttentionGroup(AttentionKind.FULL, 16)
WINDOW = AttentionGroup(AttentionKind.SLIDING_WINDOW, 16, window_tokens=128)
CHUNKED = AttentionGroup(AttentionKind.CHUNKED_LOCAL, 16, chunk_tokens=96)
MAMBA = AttentionGroup(AttentionKind.MAMBA, 16)
CPU = Tier.CPU_DRAM.flag
DRAFT = AttentionGroup(AttentionKind.FULL, 16, eagle=True)

MODELS = {
    "window": (FULL, WINDOW),
    "two windows": (FULL, WINDOW, AttentionGroup(AttentionKind.SLIDING_WINDOW_MLA, 16, window_tokens=41)),
    "window of one token": (FULL, AttentionGroup(AttentionKind.SLIDING_WINDOW, 16, window_tokens=1)),
    "mamba": (FULL, MAMBA),
    "mamba first": (MAMBA, FULL),
    "chunked": (FULL, CHUNKED),
    "everything": (FULL, WINDOW, MAMBA, CHUNKED),
    "window, full attention drafts": (DRAFT, WINDOW),
    "mamba, full attention drafts": (DRAFT, MAMBA),
    "window drafts": (FULL, AttentionGroup(AttentionKind.SLIDING_WINDOW, 16, window_tokens=80, eagle=True)),
    "both draft": (DRAFT, AttentionGroup(AttentionKind.SLIDING_WINDOW, 16, window_tokens=80, eagle=True), MAMBA),
    "larger window blocks": (FULL, AttentionGroup(AttentionKind.SLIDING_WINDOW, 64, window_tokens=200)),
    "larger mamba blocks": (FULL, AttentionGroup(AttentionKind.MAMBA, 48)),
    "larger full blocks": (AttentionGroup(AttentionKind.FULL, 32), WINDOW, AttentionGroup(AttentionKind.MAMBA, 48)),
    "two sizes of full blocks": (FULL, AttentionGroup(AttentionKind.FULL, 64)),
    "two sizes of full blocks, the smaller draft": (DRAFT, AttentionGroup(AttentionKind.MLA, 64), WINDOW),
    "two sizes of full blocks, the larger draft": (FULL, AttentionGroup(AttentionKind.FULL, 48, eagle=True)),
    "smaller window blocks": (AttentionGroup(AttentionKind.FULL, 64), WINDOW, AttentionGroup(AttentionKind.MAMBA, 64)),
    "smaller window blocks, full attention drafts": (AttentionGroup(AttentionKind.FULL, 32, eagle=True), WINDOW),
    "larger blocks that draft": (AttentionGroup(AttentionKind.FULL, 64, eagle=True), WINDOW),
}


def rule_of(model: str) -> ResumptionRule:
    """The rule in the index's blocks: full attention's if windows have smaller ones, otherwise the unit of all blocks."""
    size = MODELS[model][0].block_size if model.startswith("smaller") else None
    return ResumptionRule.of(MODELS[model], block_size=size)


@dataclass
class Tree:
    """Blocks under one root each, and those of them that full attention holds, in the device tier and in others. `usable`
    follows from that."""

    groups: tuple[AttentionGroup, ...]
    blocks: list[Stretch] = field(default_factory=list)
    held_full: set[Stretch] = field(default_factory=set)
    offloaded: set[Stretch] = field(default_factory=set)
    namespace: Namespace = field(default_factory=lambda: Namespace(b"scope id", None, None, None))
    made: int = 0

    def grow(self, parent: Stretch | None, count: int) -> list[Stretch]:
        grown = []
        for _ in range(count):
            self.made += 1
            index = 0 if parent is None else parent.index + 1
            block = Stretch(self.namespace, index, self.made.to_bytes(8, "little"), parent)
            if parent is not None:
                parent.add_child(block)
            self.blocks.append(block)
            grown.append(block)
            parent = block
        return grown

    def announce(self) -> list[Stretch]:
        """Settle what is announced. Returns the blocks for which that changed."""
        changed = []
        for block in self.blocks:  # parents come before children
            tiers = (Tier.HBM.flag if block in self.held_full else 0) | (CPU if block in self.offloaded else 0)
            usable = tiers if block.parent is None or block.parent.usable > 0 else 0
            if usable != block.usable:
                block.usable = usable
                changed.append(block)
        return changed

    def drop_forgotten(self, random: Random) -> None:
        """Like the ledger, forget leaves that are not held."""
        for block in reversed(self.blocks[:]):
            held = block.held_by or block in self.held_full or block in self.offloaded
            forgotten = not (block.usable or held or block.children)
            if forgotten and random.random() < 0.5:
                if block.parent is not None:
                    block.parent.remove_child(block)
                self.blocks.remove(block)

    def naive_marks(self, rule: ResumptionRule) -> set[Stretch]:
        """A block is marked if it ends a hit in the device tier, or one that continues in others from the end of the longest
        such hit above it."""
        device, marked = set[Stretch](), set[Stretch]()
        for block in self.blocks:  # parents come before children
            path = list(above(block))[::-1]
            if block.usable <= 0:
                continue
            if all(one in self.held_full for one in path) and _allow(path, rule, 0, 0):
                device.add(block)
                continue
            start = 0 if rule.dropped else next((one.index + 1 for one in above(block) if one in device), 0)
            if all(one in self.offloaded for one in path[start:]) and _allow(path, rule, rule.bits, start):
                marked.add(block)
        return device | marked


def _allow(path: list[Stretch], rule: ResumptionRule, shift: int, start: int) -> bool:
    """True if all groups allow it, with the bits from `shift` on. Groups with windows hold everything before `start`."""
    position = len(path) - rule.dropped
    if position <= 0 or position % rule.alignment:
        return False
    for group, bits in zip(rule.sparse, bits_of(rule), strict=True):
        naive = Group(str(group.kind), group.window_tokens, group.block_size, group.chunk_tokens, group.drops)
        known = 0 if group.kind.is_full else start
        held = [at < known or one.held_by & bit << shift > 0 for at, one in enumerate(path) for bit in bits]
        if not allows(naive, position * len(bits), rule.block_size // len(bits), held.__getitem__):
            return False
    return True


def bits_of(rule: ResumptionRule) -> list[list[int]]:
    """The bits of each sparse group in `Stretch.held_by`."""
    return [
        [first << part for part in range(max(1, rule.block_size // group.block_size))]
        for group, first in zip(rule.sparse, rule.first_bits, strict=True)
    ]


def above(block: Stretch | None) -> Iterator[Stretch]:
    while block is not None:
        yield block
        block = block.parent


def naive_heads(marked: set[Stretch]) -> dict[Stretch, int]:
    heads: dict[Stretch, int] = {}
    for block in marked:
        head = next(one for one in above(block) if one.index == block.index // SEGMENT * SEGMENT)
        heads[head] = heads.get(head, 0) | 1 << block.index % SEGMENT
    return heads


def change_something(tree: Tree, rule: ResumptionRule, random: Random) -> set[Stretch]:
    """Make changes like an engine's batch: chains are stored, mostly held by all groups at their end, and blocks are
    evicted."""
    touched: set[Stretch] = set()
    for _ in range(random.randint(1, 4)):
        act = random.random()
        if act < 0.5 or not tree.blocks:
            parent = random.choice(tree.blocks) if tree.blocks and random.random() < 0.9 else None
            grown = tree.grow(parent, random.choice((1, 3, 10, 40, 150)))
            touched.update(grown)
            for held, shift, share in ((tree.held_full, 0, 0.9), (tree.offloaded, rule.bits, 0.5)):
                if random.random() > share:
                    continue
                held.update(grown if random.random() < 0.7 else grown[-random.randint(1, 40) :])
                for bits in bits_of(rule):
                    dense = random.random() < 0.5
                    for block in grown if dense else grown[-random.randint(1, 12) :]:
                        block.held_by |= sum(bits) << shift
        elif act < 0.75:
            bits, shift = random.choice(bits_of(rule)), random.choice((0, rule.bits))
            for block in random.sample(tree.blocks, min(len(tree.blocks), random.choice((1, 5, 30)))):
                block.held_by ^= random.choice(bits) << shift
                touched.add(block)
        else:
            held = random.choice((tree.held_full, tree.offloaded))
            for block in random.sample(tree.blocks, min(len(tree.blocks), random.choice((1, 1, 4)))):
                held ^= {block}
    touched.update(tree.announce())
    return touched


@given(st.sampled_from(sorted(MODELS)), st.integers(0, 1 << 32), st.integers(1, 25))
@settings(max_examples=60)
def test_marks_and_heads_equal_a_computation_from_scratch_after_each_batch(model: str, seed: int, batches: int) -> None:
    random = Random(seed)
    rule = rule_of(model)
    tree = Tree(MODELS[model])
    marks = Marks(rule)
    published_marks: set[Stretch] = set()
    published_heads: dict[Stretch, int] = {}
    for _ in range(batches):
        change = marks.settle(change_something(tree, rule, random))
        expected = tree.naive_marks(rule)
        assert set(marks.marked) == expected
        assert dict(marks.heads) == naive_heads(expected)
        apply(change, published_marks, published_heads)
        assert published_marks == expected
        assert published_heads == naive_heads(expected)
        tree.drop_forgotten(random)


def apply(change: MarkChange, marks: set[Stretch], heads: dict[Stretch, int]) -> None:
    """Apply the change as an index would; refuses anything that changes nothing."""
    assert marks.issuperset(change.unmarked)
    assert marks.isdisjoint(change.marked)
    marks.difference_update(change.unmarked)
    marks.update(change.marked)
    for head, bits in change.heads.items():
        assert heads.get(head, 0) != bits
        if bits:
            heads[head] = bits
        else:
            del heads[head]


def chain(tree: Tree, count: int) -> list[Stretch]:
    grown = tree.grow(None, count)
    tree.held_full.update(grown)
    return grown


def positions(marks: Marks) -> list[int]:
    return sorted(block.index + 1 for block in marks.marked)


def test_with_sparse_retention_the_marks_are_islands() -> None:
    tree = Tree((FULL, WINDOW))
    blocks = chain(tree, 300)
    for at in (*range(92, 100), *range(192, 202)):  # the window of 128 tokens needs 8 blocks
        blocks[at].held_by = 1
    marks = Marks(ResumptionRule.of((FULL, WINDOW)))
    tree.announce()
    marks.settle(blocks)
    assert positions(marks) == [100, 200, 201, 202]


def test_a_prefix_within_the_window_needs_all_its_blocks_only() -> None:
    tree = Tree((FULL, WINDOW))
    blocks = chain(tree, 20)
    for block in blocks[:5]:
        block.held_by = 1
    marks = Marks(ResumptionRule.of((FULL, WINDOW)))
    tree.announce()
    marks.settle(blocks)
    assert positions(marks) == [1, 2, 3, 4, 5]


def test_a_chunks_start_needs_no_block_of_the_chunked_group() -> None:
    tree = Tree((FULL, CHUNKED))
    blocks = chain(tree, 20)
    marks = Marks(ResumptionRule.of((FULL, CHUNKED)))
    tree.announce()
    marks.settle(blocks)
    assert positions(marks) == [6, 12, 18]


def test_larger_full_blocks_count_as_long_as_all_of_them_are_held() -> None:
    groups = (DRAFT, AttentionGroup(AttentionKind.FULL, 64))
    tree = Tree(groups)
    blocks = chain(tree, 18)
    for block in blocks[3:16:4]:
        block.held_by = 1
    marks = Marks(ResumptionRule.of(groups))
    tree.announce()
    marks.settle(blocks)
    assert positions(marks) == [5, 9, 13, 17], "positions 4, 8, 12 and 16, each with the draft's block behind it"
    blocks[7].held_by = 0
    marks.settle([blocks[7]])
    assert positions(marks) == [5]


def test_only_touched_blocks_and_those_in_their_windows_are_looked_at() -> None:
    tree = Tree((FULL, WINDOW))
    blocks = chain(tree, 1_000)
    for block in blocks:
        block.held_by = 1
    marks = Marks(ResumptionRule.of((FULL, WINDOW)))
    tree.announce()
    marks.settle(blocks)
    blocks[500].held_by = 0
    change = marks.settle([blocks[500]])
    assert [block.index for block in change.unmarked] == list(range(500, 508))
    assert change.heads == {blocks[448]: (1 << SEGMENT) - 1 ^ 0xFF << 52}
    assert len({block.runs for block in blocks[508:]}) == 1
