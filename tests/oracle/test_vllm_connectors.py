"""For vLLM's own engine core with an offloading connector, reset and put to sleep, no more is predicted than it reuses."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest

from kvatlas.identity import Scope
from kvatlas.index.memory.index import MemoryIndex
from kvatlas_publishers.engine_events import EngineBatch, EngineStarted
from kvatlas_publishers.settings import PublisherSettings
from router_client import Prompt
from tests.end_to_end.socketless_worker import SocketlessWorker
from tests.publishers.hybrid_recordings import Ask, Batch, read_hybrid_recording

pytestmark = pytest.mark.anyio

RECORDER = Path(__file__).parent / "record_connectors.py"
ASKS = 200
POOL = 300
BLOCK_BYTES = 16 * 2 * 64
"""The size of a block of the groups in `record.py`, with one head of 8 numbers of 2 bytes."""

CONNECTORS: dict[str, tuple[str | None, dict[str, Any]]] = {
    "none": (None, {}),
    "offloading": ("OffloadingConnector", {}),
    "offloading-small": ("OffloadingConnector", {"cpu_bytes_to_use": 200 * BLOCK_BYTES}),
    "simple": ("SimpleCPUOffloadConnector", {}),
    "simple-lazy": ("SimpleCPUOffloadConnector", {"lazy_offload": True}),
}
CONFIGS = {
    (name := f"{connector}{'-swa' * (len(groups) > 1)}-{'resets' if resets else 'quiet'}-{seed}"): {
        "name": name,
        "connector": CONNECTORS[connector][0],
        "extra": {"cpu_bytes_to_use": 3 * POOL * BLOCK_BYTES, **CONNECTORS[connector][1]},
        "groups": groups,
        "pool": POOL * len(groups),
        "asks": ASKS,
        "resets": resets,
        "seed": seed,
    }
    for connector, groups, resets, seed in product(CONNECTORS, (["full"], ["full", "swa:128"]), (0.0, 0.1), (1, 2, 3))
}


@pytest.mark.parametrize("name", CONFIGS)
async def test_no_prompt_is_predicted_to_reuse_more_than_the_engine_core_does(recordings: Path, name: str) -> None:
    """Predictions of runs without resets are exact. A reset that keeps the connector's blocks looks like one that doesn't."""
    recording = read_hybrid_recording(recordings / f"{name}.jsonl.gz")
    worker = SocketlessWorker(PublisherSettings(worker_id="w", model_id="m", **recording.settings), MemoryIndex())
    worker.changelog.record(EngineBatch([EngineStarted()]))
    await worker.send()
    over: list[tuple[int, ...]] = []
    under: list[tuple[int, ...]] = []
    hits = far = 0
    for step in recording.steps:
        if isinstance(step, Batch):
            await worker.take(step.payload)
        elif isinstance(step, Ask):
            found = await worker.usable_tokens(Prompt.of_tokens(Scope("m", "m"), step.tokens))
            hits += step.hit > 0
            far += step.far > 0
            if found != step.hit:
                (over if found > step.hit else under).append((len(step.tokens), found, step.hit, step.far))
    await worker.check()
    print(f"{name}: {len(over)} over, {len(under)} under of {ASKS}; {hits} hits, {far} of them from the connector")
    assert not over, (
        f"{len(over)} of {ASKS} over-claimed (prompt, predicted, real, of it from the connector): {over[:5]}"
    )
    assert hits > ASKS // 5
    if "none" in name or "quiet" in name:
        assert not under, (
            f"{len(under)} of {ASKS} too low (prompt, predicted, real, of it from the connector): {under[:5]}"
        )
