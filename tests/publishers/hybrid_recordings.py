"""Recordings of vLLM's own KV cache manager: what it published, and what it really reused of each prompt asked in between.

Each file is one model configuration. Line 1 describes it; each later line is a batch, a prompt asked when all batches before
it had been published (an `Ask`), or a change of what `/v1/models` names as the adapter's root (a `Repoint`).
"""

import base64
import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

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
    """A prompt, and how many of its tokens the engine reused; `far` of them came from the CPU tier."""

    tokens: tuple[int, ...]
    adapter: str | None
    skip: bool
    hit: int
    far: int


@dataclass(frozen=True)
class HybridRecording:
    """`groups` as the file names them: full, swa:WINDOW, chunked:SIZE, mamba. `eagle`: a hit drops its last block.

    `lookahead`: how many tokens behind a block its hash covers.
    """

    name: str
    block_size: int
    groups: tuple[str, ...]
    eagle: bool
    lookahead: int
    steps: tuple[Batch | Repoint | Ask, ...]


def read_hybrid_recording(path: Path) -> HybridRecording:
    with gzip.open(path, "rt") as lines:
        head = json.loads(next(lines))
        steps = tuple(_steps(map(json.loads, lines)))
    config = head["config"]
    name = path.name.removesuffix(".jsonl.gz")
    drops = config["eagle"] and not config["lookahead"]
    return HybridRecording(name, head["block_size"], tuple(config["groups"]), drops, config["lookahead"], steps)


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
                yield Ask(prompts[-1], ask["adapter"], ask["skip"], hit, far)
            case _:
                raise ValueError(f"line {line!r:.80} is no step of a hybrid recording")
