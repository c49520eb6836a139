"""Events of an engine that speaks the open event forms: prompts that share heads, evicted leaf first, some by way of DRAM."""

import json
import random
from collections.abc import Sequence
from typing import Any

import msgpack

from kvatlas.blocks.hashing import local_hash

BLOCK = 4
KEPT = 40


class OpenTraffic:
    """`batches`: the payloads, JSON and msgpack in turn. At the end, KEPT blocks are held."""

    def __init__(self, *, numbered: bool, seed: int = 7) -> None:
        self._rng = random.Random(seed)
        self._numbered = numbered
        self._names: dict[tuple[int, ...], int] = {}
        self._in_dram: set[int] = set()
        self._next_id = 0
        self.batches = [self._pack(at, self._step()) for at in range(120)]

    def _pack(self, at: int, events: Sequence[dict[str, Any]]) -> bytes:
        batch: dict[str, Any] = {"events": events, "shutdown": False}
        if not self._numbered:
            batch = {"engine_id": "e", "ts_ms": at, "events": events}
        return json.dumps(batch).encode() if at % 2 else bytes(msgpack.packb(batch))

    def _step(self) -> list[dict[str, Any]]:
        rng, names = self._rng, self._names
        topic, length = rng.randrange(4), rng.randint(1, 6) * BLOCK
        prompt = (*range(topic * 1_000, topic * 1_000 + 2 * BLOCK), *(rng.randrange(3) for _ in range(length)))
        depth = 0
        while prompt[: depth + BLOCK] in names and depth < len(prompt):
            depth += BLOCK
        events = []
        if depth < len(prompt):
            ends = range(depth + BLOCK, len(prompt) + 1, BLOCK)
            for end in ends:
                names[prompt[:end]] = rng.getrandbits(64)
            events.append(self._stored(prompt, depth, [names[prompt[:end]] for end in ends]))
        while len(names) > KEPT:
            longer = {one[:-BLOCK] for one in names}
            leaf = rng.choice([one for one in names if one not in longer])
            name = names[leaf]
            if not self._numbered and name not in self._in_dram and rng.random() < 0.3:
                self._in_dram.add(name)
                events.append({"type": "block_stored", "block_hashes": [name], "block_size": BLOCK, "medium": "cpu"})
                events.append({"type": "block_removed", "block_hashes": [name], "medium": "gpu"})
                continue
            del names[leaf]
            events.append(self._removed(name))
        return events

    def _stored(self, prompt: tuple[int, ...], depth: int, names: list[int]) -> dict[str, Any]:
        parent = self._names[prompt[:depth]] if depth else None
        if not self._numbered:
            return {
                "type": "block_stored",
                "block_hashes": names,
                "parent_block_hash": parent,
                "token_ids": prompt[depth:],
                "block_size": BLOCK,
            }
        blocks = [
            {"block_hash": name, "tokens_hash": local_hash(prompt[at : at + BLOCK])}
            for at, name in zip(range(depth, len(prompt), BLOCK), names, strict=True)
        ]
        return self._number({"stored": {"parent_hash": parent, "blocks": blocks}})

    def _removed(self, name: int) -> dict[str, Any]:
        if not self._numbered:
            return {"type": "block_removed", "block_hashes": [name]}
        signed = name - (1 << 64) if name >= 1 << 63 else name
        return self._number({"removed": {"block_hashes": [signed]}})

    def _number(self, data: dict[str, Any]) -> dict[str, Any]:
        self._next_id += 1
        return {"event_id": self._next_id - 1, "data": data}
