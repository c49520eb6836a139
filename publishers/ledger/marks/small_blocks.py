"""Blocks of sparse groups that are smaller than those announced: which announced block each is a part of.

A group may have several blocks where full attention has one (Gemma 4: windows of 16 tokens a block beside 32). The last of them
has the hash of the whole block, its **anchor**; the others have hashes that no other event names. An event tells its hashes in
order, and left out are only blocks before a run: a sparse group keeps runs that end where a prompt may be resumed, at an
anchor (vLLM 0.33, `SlidingWindowManager.reachable_block_mask`). So the hashes just before an anchor are its other parts.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

from kvatlas_publishers.engine_events import EngineHash

_NONE: Mapping[int, EngineHash] = {}


class SmallBlocks:
    """`parts`: how many of the small blocks make up an announced one; the last has number `parts - 1`, and the anchor's hash.

    `tied`: the anchors of each part that is known, anchors themselves left out; several where prompts fork behind the part.
    """

    def __init__(self, parts: int) -> None:
        self.parts = parts
        self.tied: dict[EngineHash, dict[EngineHash, int]] = {}
        """By part: its number in the block of each anchor."""
        self._of_anchor: dict[EngineHash, dict[int, EngineHash]] = {}
        self._untied: list[Sequence[EngineHash]] = []

    def stored(self, hashes: Sequence[EngineHash]) -> None:
        """Hashes of one event, in order. They are tied by `tie`, when the batch's anchors are known."""
        self._untied.append(hashes)

    def tie(
        self, is_anchor: Callable[[EngineHash], bool], is_held: Callable[[EngineHash], bool]
    ) -> Iterator[tuple[EngineHash, EngineHash, int]]:
        """Tie the hashes stored since the last call that are held. Yields each new one with its anchor and number."""
        untied, self._untied = self._untied, []
        for hashes in untied:
            before: list[EngineHash] = []
            for name in hashes:
                if not is_anchor(name):
                    before.append(name)
                    continue
                for number, part in zip(range(self.parts - 2, -1, -1), reversed(before), strict=False):
                    if number not in self.of(name) and is_held(part):
                        self.restore(part, name, number)
                        yield part, name, number
                before.clear()

    def restore(self, part: EngineHash, anchor: EngineHash, number: int) -> None:
        """As it was tied. Raises ValueError for a part that can't be."""
        if number in self.of(anchor) or not 0 <= number < self.parts - 1:
            raise ValueError(f"part {number!r:.20} of {self.parts} of a block, or twice")
        self.tied.setdefault(part, {})[anchor] = number
        self._of_anchor.setdefault(anchor, {})[number] = part

    def of(self, anchor: EngineHash) -> Mapping[int, EngineHash]:
        """The known parts of an anchor, by number."""
        return self._of_anchor.get(anchor, _NONE)

    def forget(self, part: EngineHash) -> None:
        """No group holds it any more."""
        for anchor, number in self.tied.pop(part, {}).items():
            parts = self._of_anchor[anchor]
            del parts[number]
            if not parts:
                del self._of_anchor[anchor]
