"""Recordings of real engines' feeds: the exact payloads, and the content of the engine's own block table at the end."""

import gzip
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvatlas.blocks.tiers import Tier, parse_tier
from kvatlas.fleet.records import EngineKind
from kvatlas_publishers.engine_events import EngineHash

FOLDER = Path(__file__).parent.parent / "data" / "engine-recordings"
FILES = sorted(FOLDER.glob("*.jsonl.gz"))

Held = tuple[Tier, int, EngineHash]
"""(tier, group, engine hash)"""


@dataclass(frozen=True)
class Recording:
    name: str
    kind: EngineKind
    block_size: int
    batches: list[tuple[int, bytes]]
    expected_resident: frozenset[Held]
    expected_usable: frozenset[Held]
    a_set_fold_would_miss: int


def read_recording(path: Path) -> Recording:
    with gzip.open(path, "rt") as lines:
        head, *rest = map(json.loads, lines)
    as_bytes = head["hash_form"] == "bytes"

    def held(listed: list[Any]) -> frozenset[Held]:
        """vLLM lists [group, hash], SGLang [medium, hash]."""
        return frozenset(
            (Tier.HBM, where, bytes.fromhex(name) if as_bytes else name)
            if isinstance(where, int)
            else (parse_tier(where), 0, name)
            for where, name in listed
        )

    return Recording(
        name=head["name"],
        kind=EngineKind(head["engine"]),
        block_size=head["block_size"],
        batches=[(line["seq"], bytes.fromhex(line["payload_hex"])) for line in rest],
        expected_resident=held(head["expected_resident"]),
        expected_usable=held(head["expected_usable"]),
        a_set_fold_would_miss=head["a_set_fold_would_miss"],
    )
