"""Maps small blocks of sparse groups to the larger published blocks that they are part of.

A group may have several blocks for one of full attention (Gemma 4: window blocks of 16 tokens, full-attention blocks of 32).
The last of them has the hash of the whole block, its **anchor**; the others have hashes that no other event names. An event
lists its hashes in order, and only blocks before a run are left out: a sparse group keeps runs that end where a prompt may be
resumed, at an anchor (vLLM 0.33, `SlidingWindowManager.reachable_block_mask`). So the hashes just before an anchor are its
other parts.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

from kvatlas_publishers.engine_events import EngineHash

_NONE: Mapping[int, EngineHash] = {}


class SmallBlocks:
    """`parts`: how many small blocks make up a published one. The last is number `parts - 1` and has the anchor's hash.

    `tied`: the anchors of each known part that is not an anchor itself. A part has several if prompts fork after it.
    """

    def __init__(self, parts: int) -> None:
        self.parts = parts
        self.tied: dict[EngineHash, dict[EngineHash, int]] = {}
        """Each part's number in the block of each of its anchors."""
        self._of_anchor: dict[EngineHash, dict[int, EngineHash]] = {}
        self._untied: list[Sequence[EngineHash]] = []

    def stored(self, hashes: Sequence[EngineHash]) -> None:
        """Keep the hashes of one event, in order, for `tie`, which must be called once the batch's anchors are
        known."""
        self._untied.append(hashes)

    def tie(
        self, is_anchor: Callable[[EngineHash], bool], is_held: Callable[[EngineHash], bool]
    ) -> Iterator[tuple[EngineHash, EngineHash, int]]:
        """Tie the held hashes stored since the last call. Yields each new one with its anchor and number."""
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
        """Tie a part to its anchor. Raises ValueError for an invalid or taken number."""
        if number in self.of(anchor) or not 0 <= number < self.parts - 1:
            raise ValueError(f"block part {number!r:.20} is already taken, or not below {self.parts - 1}")
        self.tied.setdefault(part, {})[anchor] = number
        self._of_anchor.setdefault(anchor, {})[number] = part

    def of(self, anchor: EngineHash) -> Mapping[int, EngineHash]:
        """The known parts of an anchor, by number."""
        return self._of_anchor.get(anchor, _NONE)

    def forget(self, part: EngineHash) -> None:
        """Forget a part that is no longer held by any group."""
        for anchor, number in self.tied.pop(part, {}).items():
            parts = self._of_anchor[anchor]
            del parts[number]
            if not parts:
                del self._of_anchor[anchor]
