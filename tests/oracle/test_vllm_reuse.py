"""Every prompt's predicted reuse equals what vLLM's own KV cache manager reuses: models, retentions, forks and seeds.

It is predicted twice: by a naive model of the rules, and by a router from what the publisher's ledger reported to the index.
"""

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from kvatlas.blocks.reuse import CacheReading
from kvatlas.identity import Scope
from kvatlas.index.memory.index import MemoryIndex
from kvatlas_publishers.engine_events import EngineBatch, EngineStarted
from kvatlas_publishers.settings import PublisherSettings
from router_client import Prompt
from tests.end_to_end.socketless_worker import SocketlessWorker
from tests.publishers.hybrid_recordings import Ask, Batch, read_hybrid_recording

pytestmark = pytest.mark.anyio

RECORDER = Path(__file__).parent / "record.py"
ASKS = 120

# model: groups (as record.py has them), blocks of the pool, retention intervals it is run with
MODELS: dict[str, tuple[list[str], int, tuple[int | None, ...]]] = {
    "full": (["full"], 700, (0,)),
    "swa128": (["full", "swa:128"], 900, (None, 0, 256)),
    "swa1024": (["full", "swa:1024"], 900, (None, 0)),
    "two-swa": (["full", "swa:128", "swa:512"], 1_100, (None, 0)),
    "mla-swa": (["mla", "swa:100"], 900, (0,)),
    "mamba": (["full@64", "mamba@64"], 250, (None, 0, 512)),
    "mamba-first": (["mamba@64", "full@64"], 250, (0,)),
    "swa-mamba": (["full@64", "swa:128@64", "mamba@64"], 450, (None, 0)),
    "chunked512": (["full", "chunked:512"], 1_000, (None,)),
    "chunked-mamba": (["full@64", "chunked:1024@64", "mamba@64"], 450, (None, 0)),
    "larger-swa-blocks": (["full", "swa:128@64"], 900, (None, 0)),
    "gemma": (["full@32", "swa:512"], 900, (None, 0, 256)),
    "gemma-swa-first": (["swa:1000", "full@32"], 1_100, (0,)),
    "gemma-two-swa": (["full@64", "swa:512", "swa:130"], 1_100, (None, 0)),
    "larger-full-blocks": (["full", "full@64"], 900, (0,)),
}
FORKS = (None, "anywhere", "blocks")
SEEDS = (1, 2)

# with EAGLE: groups, pool, retentions, lookahead tokens of each hash
DRAFTING: dict[str, tuple[list[str], int, tuple[int | None, ...], int]] = {
    "eagle": (["full!"], 700, (0,), 0),
    "eagle-lookahead": (["full!"], 700, (0,), 1),
    "eagle-swa": (["full!", "swa:128"], 900, (None, 0), 0),
    "eagle-swa-lookahead": (["full!", "swa:128"], 900, (None, 0), 1),
    "eagle-mamba": (["full@64!", "mamba@64"], 250, (None, 0), 0),
    "eagle-in-swa": (["full", "swa:128!"], 900, (None, 0), 0),
    "eagle-in-both": (["full!", "swa:128!"], 900, (None, 0), 0),
    "eagle-two-full": (["full!", "full@64"], 900, (0,), 0),
    "eagle-larger-full": (["full", "full@64!"], 900, (0,), 0),
    "eagle-two-full-swa": (["full!", "full@64", "swa:128"], 1_300, (None, 0), 0),
    "eagle-larger-swa-blocks": (["full!", "swa:128@64!"], 900, (0,), 0),
    "eagle-swa-mamba": (["full@64!", "swa:128@64", "mamba@64"], 450, (0,), 0),
    "eagle-gemma": (["full@32!", "swa:512"], 900, (0,), 0),
    "eagle-gemma-lookahead": (["full@32!", "swa:512!"], 900, (0,), 1),
    "eagle-two-swa": (["full!", "swa:128!", "swa:512"], 1_100, (0,), 0),
}


# ranks of decode context parallelism: groups, pool, ranks, EAGLE without lookahead hashes
SHARDED: dict[str, tuple[list[str], int, int, bool]] = {
    "dcp2": (["full"], 400, 2, False),
    "dcp4-mla": (["mla"], 250, 4, False),
    "dcp2-eagle": (["full!"], 400, 2, True),
    "dcp2-replicated-draft": (["full", "full=!"], 700, 2, True),
    "dcp4-replicated-draft": (["mla", "full=!"], 600, 4, True),
    "dcp2-draft": (["mla!", "full=!"], 700, 2, True),
}

# some requests have their hits reported, some don't read the cache: groups, pool, EAGLE, lookahead tokens
MIXED: dict[str, tuple[list[str], int, bool, int]] = {
    "mixed": (["full"], 700, False, 0),
    "mixed-small-pool": (["full"], 420, False, 0),
    "mixed-swa": (["full", "swa:128"], 900, False, 0),
    "mixed-mamba": (["full@64", "mamba@64"], 250, False, 0),
    "mixed-chunked": (["full", "chunked:512"], 1_000, False, 0),
    "mixed-gemma": (["full@32", "swa:512"], 900, False, 0),
    "mixed-lookahead": (["full!"], 700, True, 1),
    "mixed-eagle-swa": (["full!", "swa:128!"], 900, True, 0),
}

# with images: groups, pool, EAGLE, lookahead tokens
IMAGES: dict[str, tuple[list[str], int, bool, int]] = {
    "images": (["full"], 900, False, 0),
    "images-swa": (["full", "swa:128"], 1_100, False, 0),
    "images-lookahead": (["full!"], 900, True, 1),
    "images-eagle-mamba": (["full@64!", "mamba@64"], 300, True, 0),
}


def grid() -> Iterator[dict[str, Any]]:
    for model, (groups, pool, retentions) in MODELS.items():
        yield from _configs(model, groups, pool, retentions, eagle=False, lookahead=0)
    for model, (groups, pool, retentions, lookahead) in DRAFTING.items():
        yield from _configs(model, groups, pool, retentions, eagle=True, lookahead=lookahead)
    for model, (groups, pool, ranks, eagle) in SHARDED.items():
        yield from _configs(model, groups, pool, (0,), eagle=eagle, lookahead=0, dcp=ranks)
    for model, (groups, pool, eagle, lookahead) in MIXED.items():
        for retention in (None, 0)[len(groups) == 1 :]:
            yield from _configs(model, groups, pool, (retention,), eagle=eagle, lookahead=lookahead, mixed=True)
    for model, (groups, pool, eagle, lookahead) in IMAGES.items():
        yield from _configs(model, groups, pool, (0,), eagle=eagle, lookahead=lookahead, images=True)


def _configs(
    model: str,
    groups: list[str],
    pool: int,
    retentions: tuple[int | None, ...],
    *,
    eagle: bool,
    lookahead: int,
    **more: Any,
) -> Iterator[dict[str, Any]]:
    for retention, fork, seed in product(retentions, FORKS, SEEDS):
        yield {
            "name": f"{model}-{'dense' if retention is None else retention}-{fork or 'grow'}-{seed}",
            "groups": groups,
            "pool": pool,
            "retention": retention,
            "eagle": eagle,
            "lookahead": lookahead,
            "fork": fork,
            "asks": ASKS,
            "seed": seed,
            **more,
        }


UNDER_REPORTED = ("eagle-larger-full", "mixed")
"""Models for which a router finds less than the engine. For the others, it may find less for a few prompts whose blocks have
second copies: see docs/engines.md."""
MOST_UNDER = ASKS // 10

CONFIGS = {config["name"]: config for config in grid()}


@pytest.mark.parametrize("name", CONFIGS)
async def test_every_prediction_equals_the_managers_hit(recordings: Path, name: str) -> None:
    recording = read_hybrid_recording(recordings / f"{name}.jsonl.gz")
    model = recording.naive_reuse()
    settings = PublisherSettings(worker_id="w", model_id="hybrid", **recording.settings)
    worker = SocketlessWorker(settings, MemoryIndex())
    worker.changelog.record(EngineBatch([EngineStarted()]))
    await worker.send()
    wrong = []
    hits = under = 0
    for step in recording.steps:
        if isinstance(step, Batch):
            model.fold(step.payload)
            await worker.take(step.payload)
        elif isinstance(step, Ask):
            naive = step.hit
            if model.knows_all_hashes and not name.startswith("mixed"):
                naive = model.reusable(step.tokens, lookahead=recording.lookahead, media=step.media)
            reading = CacheReading(skip=step.skip)
            prompt = Prompt.of_tokens(Scope("hybrid", "hybrid"), step.tokens, reading=reading, media=step.media)
            routed = await worker.usable_tokens(prompt)
            hits += step.hit > 0
            under += routed < step.hit
            if naive != step.hit or routed > step.hit:
                wrong.append((len(step.tokens), naive, routed, step.hit))
    await worker.check()
    assert not wrong, f"{len(wrong)} of {ASKS} wrong (prompt, naive, routed, real): {wrong[:5]}"
    assert under <= MOST_UNDER or name.startswith(UNDER_REPORTED), f"{under} of {ASKS} under-predicted"
    assert hits > ASKS // 4
