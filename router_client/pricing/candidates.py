"""The candidates of a pool: workers that may get a prompt, in groups that the store treats as alike."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvatlas.blocks.reuse import ReuseRule
from kvatlas.fleet.records import EngineEndpoint
from kvatlas.reservations.room_and_slo import UNKNOWN_LIMIT, Limit

ODD_BYTES = 5
"""Number of bytes that an odd worker takes up in an ask in addition to its id."""
MOST_SHAPES = 8
"""Maximum number of block shapes in which a prompt is looked up. Each needs its own chain and its own call."""


class BlockShape(NamedTuple):
    """How a worker cuts prompts into blocks. Workers with the same shape are looked up with the same hashes."""

    block_size: int
    granularity: int
    lookahead_tokens: int = 0


def shape_of(endpoint: EngineEndpoint) -> BlockShape | None:
    """How a worker cuts prompts into blocks; None: it has not announced any block yet."""
    if endpoint.block_size is None:
        return None
    return BlockShape(endpoint.block_size, endpoint.granularity, endpoint.lookahead_tokens)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A worker that may get a prompt.

    `kind`: the same number for all workers on which a request costs the same, apart from their cache content and load.
    `block_size` 0: the worker has not announced any block yet. `total_blocks`: the size of its cache, 0 if unknown.
    `limit`: how many requests and tokens it can hold. `likeness`: the likeness under which the store knows it
    (`kvatlas.reservations.likeness`).
    """

    id: str
    kind: int
    endpoint: EngineEndpoint
    block_size: int
    rule: ReuseRule
    total_blocks: int = 0
    limit: Limit = UNKNOWN_LIMIT
    likeness: bytes = b""

    @property
    def shape(self) -> BlockShape | None:
        """How the worker cuts prompts into blocks; None: it has not announced any block yet."""
        return shape_of(self.endpoint)


@dataclass(frozen=True, slots=True)
class KindRows:
    """One row for each likeness and kind of candidates, with the likeness and an example candidate. The first row of a
    likeness is for all of its workers except the odd ones, whose row numbers are in `odd`. `numbers`: row numbers by
    likeness and kind."""

    rows: tuple[tuple[bytes, Candidate], ...] = ()
    numbers: Mapping[tuple[bytes, int], int] = field(default_factory=dict)
    odd: Mapping[str, int] = field(default_factory=dict)
    odd_bytes: int = 0
    """Upper bound on the bytes that odd workers take up in an ask. Ids have one byte per character."""

    @classmethod
    def of(cls, groups: "Sequence[Group]") -> "KindRows":
        rows = [(group.likeness, example) for group in groups for example in (group.example, *group.odd_examples)]
        numbers = {(likeness, example.kind): number for number, (likeness, example) in enumerate(rows)}
        odd = {id: numbers[group.likeness, kind] for group in groups for id, kind in group.odd.items()}
        return cls(tuple(rows), numbers, odd, sum(map(len, odd)) + ODD_BYTES * len(odd))

    @property
    def have_marks(self) -> bool:
        """True if one of the candidates has marks."""
        return any(example.endpoint.marks for _, example in self.rows)


@dataclass(frozen=True, slots=True)
class Group:
    """The candidates of one likeness. `ids`: those of the same kind as `example`; `odd`: those of other kinds;
    `odd_examples`: one example for each of these kinds."""

    likeness: bytes
    example: Candidate
    ids: frozenset[str]
    odd: Mapping[str, int]
    odd_examples: tuple[Candidate, ...] = ()

    @property
    def size(self) -> int:
        return len(self.ids) + len(self.odd)


def groups_of(candidates: Sequence[Candidate]) -> tuple[Group, ...]:
    """Group candidates by likeness; each group's example is of the group's most frequent kind."""
    alike: dict[bytes, list[Candidate]] = {}
    for candidate in candidates:
        alike.setdefault(candidate.likeness, []).append(candidate)
    groups = []
    for likeness, members in alike.items():
        ((kind, _),) = Counter(candidate.kind for candidate in members).most_common(1)
        ids = frozenset(candidate.id for candidate in members if candidate.kind == kind)
        example = next(candidate for candidate in members if candidate.kind == kind)
        odd = {candidate.id: candidate.kind for candidate in members if candidate.kind != kind}
        others = {candidate.kind: candidate for candidate in members if candidate.kind != kind}
        groups.append(Group(likeness, example, ids, odd, tuple(others.values())))
    return tuple(groups)
