"""Recordings of vLLM's own KV cache manager: what it published, and what it really reused of each prompt asked in between.

Each file is one model configuration. Line 1 describes it; each later line is a batch, a prompt asked after all earlier batches
had been published (an `Ask`), or a change of the adapter's root in `/v1/models` (a `Repoint`).
"""

import base64
import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass
from math import lcm
from pathlib import Path
from typing import Any, Self

from kvatlas.blocks.media import MediaItem
from tests.publishers.naive_reuse import Group, NaiveReuse

FOLDER = Path(__file__).parent.parent / "data" / "hybrid-recordings"
FILES = sorted(FOLDER.glob("*.jsonl.gz"))


@dataclass(frozen=True)
class Batch:
    seq: int
    payload: bytes


@dataclass(frozen=True)
class Repoint:
    path: str


@dataclass(frozen=True)
class Ask:
    """A prompt, and the number of its tokens that the engine reused; `far` of them came from the CPU tier. `media`: its
    images."""

    tokens: tuple[int, ...]
    adapter: str | None
    skip: bool
    hit: int
    far: int
    media: tuple[MediaItem, ...] = ()


@dataclass(frozen=True)
class RecordedGroup:
    """One KV cache group. `size`: tokens of its window or chunk, 0 for other kinds; `block_size`: as its events have it.

    `drafts`: it has the draft model's layers, so without lookahead hashes a hit drops its last block.
    """

    kind: str
    size: int
    block_size: int
    drafts: bool

    @classmethod
    def parse(cls, described: str, block_size: int, dcp: int) -> Self:
        """Parse KIND[:SIZE][@BLOCK][=][!] (see `tests/oracle/record.py`)."""
        kind, _, block = described.rstrip("=!").partition("@")
        kind, _, size = kind.partition(":")
        ranks = 1 if "=" in described or kind == "mamba" else dcp
        return cls(kind, int(size or 0), int(block or block_size) * ranks, described.endswith("!"))


@dataclass(frozen=True)
class HybridRecording:
    """`block_size`: tokens of a hash. `eagle`: a hit drops its last block, of the groups that draft or, if none does, of full
    attention. `lookahead`: number of tokens after a block that its hash covers."""

    name: str
    block_size: int
    groups: tuple[RecordedGroup, ...]
    eagle: bool
    lookahead: int
    steps: tuple[Batch | Repoint | Ask, ...]

    @property
    def settings(self) -> dict[str, Any]:
        """The facts that no event reports, as a publisher's settings."""
        return {
            "chunk_size": max(group.size if group.kind == "chunked" else 0 for group in self.groups),
            "eagle": self.eagle or self.lookahead > 0,
            "eagle_groups": tuple(index for index, group in enumerate(self.groups) if group.drafts),
        }

    def naive_reuse(self) -> NaiveReuse:
        """The naive model of this engine, with the facts that no event reports."""
        told = any(group.drafts for group in self.groups)
        groups = {
            index: Group(
                block_size=group.block_size,
                chunk=group.size if group.kind == "chunked" else None,
                eagle=self.eagle and (group.drafts if told else group.kind == "full"),
                full=group.kind in ("full", "mla"),
            )
            for index, group in enumerate(self.groups)
        }
        largest = lcm(*(group.block_size for group in self.groups))
        return NaiveReuse(self.block_size, groups, alignment=largest // self.block_size)


def read_hybrid_recording(path: Path) -> HybridRecording:
    with gzip.open(path, "rt") as lines:
        head = json.loads(next(lines))
        steps = tuple(_steps(map(json.loads, lines)))
    config = head["config"]
    name = path.name.removesuffix(".jsonl.gz")
    size = 16 if "name" in config else head["block_size"]  # tests/oracle/record.py names its recordings
    groups = tuple(RecordedGroup.parse(group, size, config.get("dcp", 1)) for group in config["groups"])
    drops = config["eagle"] and not config["lookahead"]
    return HybridRecording(name, head["block_size"], groups, drops, config["lookahead"], steps)


def _steps(lines: Iterator[dict[str, object]]) -> Iterator[Batch | Repoint | Ask]:
    prompts: list[tuple[int, ...]] = []
    for line in lines:
        match line:
            case {"batch": str(payload), "seq": int(seq)}:
                yield Batch(seq, base64.b64decode(payload))
            case {"repoint": str(root)}:
                yield Repoint(root)
            case {"ask": dict(ask), "hit": int(hit), "far": int(far)}:
                start = () if ask["like"] is None else prompts[ask["like"]][: ask["first"]]
                prompts.append((*start, *ask["more"]))
                media = tuple(MediaItem(*item) for item in ask.get("media", ()))
                yield Ask(prompts[-1], ask["adapter"], ask["skip"], hit, far, media)
            case _:
                raise ValueError(f"line {line!r:.80} is no step of a hybrid recording")
