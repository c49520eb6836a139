"""The deepest resumable position of a chain equals the one found by looking at every block, on random trees of blocks and
marks."""

from dataclasses import dataclass
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from kvatlas.index.mark_lookup import SEGMENT, MarkedHolder, deepest_positions


@dataclass(frozen=True)
class MarkedTree:
    """Blocks as packed hashes with their paths from the root, and which holders marked them."""

    paths: dict[bytes, tuple[bytes, ...]]
    marked: dict[bytes, frozenset[bytes]]

    def head_values(self) -> dict[bytes, bytes]:
        bits: dict[bytes, dict[bytes, int]] = {}
        for block, numbers in self.marked.items():
            path = self.paths[block]
            index = len(path) - 1
            entries = bits.setdefault(path[index // SEGMENT * SEGMENT], {})
            for number in numbers:
                entries[number] = entries.get(number, 0) | 1 << index % SEGMENT
        return {
            head: b"".join(number + entries[number].to_bytes(8, "big") for number in sorted(entries))
            for head, entries in bits.items()
        }

    def mark_values(self) -> dict[bytes, bytes]:
        return {block: b"".join(sorted(numbers)) for block, numbers in self.marked.items() if numbers}


def marked_tree(random: Random, dropped: dict[bytes, int]) -> MarkedTree:
    paths: dict[bytes, tuple[bytes, ...]] = {}
    for _ in range(random.randint(1, 8)):
        path: tuple[bytes, ...] = ()
        if paths and random.random() < 0.8:
            path = random.choice(list(paths.values()))
        for _ in range(random.choice((1, 10, 70, 200))):
            path = (*path, random.randbytes(8))
            paths[path[-1]] = path
    density = random.choice((0.01, 0.2, 0.9))
    marked = {
        block: frozenset(n for n, drop in dropped.items() if len(path) > drop and random.random() < 0.5)
        for block, path in paths.items()
        if random.random() < density
    }
    return MarkedTree(paths, marked)


@given(st.integers(0, 1 << 32))
def test_the_deepest_position_equals_a_look_at_every_block(seed: int) -> None:
    random = Random(seed)
    # numbers whose bytes overlap: an entry is found only where one begins
    numbers = random.sample([b"\0\0\1", b"\0\1\0", b"\1\0\0", b"\1\1\1", b"\0\0\0", b"\2\0\0"], random.randint(1, 6))
    dropped = {number: random.choice((0, 0, 1, 4)) for number in numbers}
    tree = marked_tree(random, dropped)
    chain = random.choice(list(tree.paths.values()))
    chain = (*chain[: random.randint(0, len(chain))], *(random.randbytes(8) for _ in range(random.choice((0, 90)))))
    known = sum(block in tree.paths for block in chain)
    limit = random.randint(0, len(chain) + 2)
    holders = {number: MarkedHolder(random.randint(0, known), dropped[number]) for number in numbers}
    expected = {}
    for number, (depth, drop) in holders.items():
        reached = [
            index + 1 - drop for index in range(min(depth, limit + drop)) if number in tree.marked.get(chain[index], ())
        ]
        if reached:
            expected[number] = max(reached)
    found = deepest_positions(tree.head_values().get, tree.mark_values().get, b"".join(chain), holders, limit)
    assert found == expected


def test_bits_of_other_branches_are_not_taken_for_marks_of_the_chain() -> None:
    holder = b"\0\0\1"
    trunk = [bytes([0, *divmod(index, 256), 0, 0, 0, 0, 0]) for index in range(200)]
    heads = {
        trunk[128]: holder + b"\xff" * 8,
        trunk[64]: holder + b"\xff" * 8,
        trunk[0]: holder + (1 << 9).to_bytes(8, "big"),
    }
    marks = {trunk[9]: holder}
    found = deepest_positions(heads.get, marks.get, b"".join(trunk), {holder: MarkedHolder(200)}, 200)
    assert found == {holder: 10}
