"""Every prompt's predicted reuse equals what vLLM's own KV cache manager reuses: models, retentions, forks and seeds.

Predicted twice: by a naive model of the rules, and by a router from what the publisher's ledger told the index.
"""

import json
import subprocess
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from kvatlas.identity import Scope
from kvatlas.index.memory.index import MemoryIndex
from publishers.settings import PublisherSettings
from router_client import Prompt
from tests.end_to_end.socketless_worker import SocketlessWorker
from tests.oracle.conftest import PYTHON
from tests.publishers.hybrid_recordings import Ask, Batch, read_hybrid_recording
from tests.publishers.naive_reuse import Group, NaiveReuse

pytestmark = pytest.mark.anyio

RECORDER = Path(__file__).parent / "record.py"
ASKS = 120

# model: groups (KIND[:SIZE][@BLOCK][!], `!`: draft layers are in it), blocks of the pool, retention intervals it is run with
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
    "eagle-larger-swa-blocks": (["full!", "swa:128@64!"], 900, (0,), 0),
    "eagle-swa-mamba": (["full@64!", "swa:128@64", "mamba@64"], 450, (0,), 0),
    "eagle-two-swa": (["full!", "swa:128!", "swa:512"], 1_100, (0,), 0),
}


def grid() -> Iterator[dict[str, Any]]:
    for model, (groups, pool, retentions) in MODELS.items():
        yield from _configs(model, groups, pool, retentions, eagle=False, lookahead=0)
    for model, (groups, pool, retentions, lookahead) in DRAFTING.items():
        yield from _configs(model, groups, pool, retentions, eagle=True, lookahead=lookahead)


def _configs(
    model: str, groups: list[str], pool: int, retentions: tuple[int | None, ...], *, eagle: bool, lookahead: int
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
        }


UNDER_REPORTED = ("eagle-two-full",)
"""Models for which a router finds less than the engine: see docs/engines.md."""

CONFIGS = {config["name"]: config for config in grid()}


@pytest.fixture(scope="session")
def recordings(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a recording of each config that a test of this run reads."""
    folder = tmp_path_factory.mktemp("oracle")
    assert PYTHON is not None
    selected = [name for name in CONFIGS if any(f"[{name}]" in item.name for item in request.session.items)]
    lines = "".join(json.dumps(CONFIGS[name]) + "\n" for name in selected)
    done = subprocess.run([PYTHON, RECORDER, folder], input=lines, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr[-4_000:]
    return folder


def groups_of(config: dict[str, Any]) -> dict[int, Group]:
    """What no event says: chunk sizes and where the draft layers are; and block sizes, before the first event tells them."""
    groups = {}
    for index, described in enumerate(config["groups"]):
        kind, _, block = described.rstrip("!").partition("@")
        chunk = int(kind.partition(":")[2]) if kind.startswith("chunked") else None
        drops = config["eagle"] and not config["lookahead"] and described.endswith("!")
        groups[index] = Group(block_size=int(block or 16), chunk=chunk, eagle=drops)
    return groups


def settings_of(config: dict[str, Any]) -> PublisherSettings:
    """What no event tells."""
    chunks = [
        int(group.partition(":")[2].partition("@")[0]) for group in config["groups"] if group.startswith("chunked")
    ]
    drafts = tuple(i for i, group in enumerate(config["groups"]) if group.endswith("!"))
    return PublisherSettings(
        worker_id="w",
        model_id="hybrid",
        chunk_size=max(chunks, default=0),
        eagle=config["eagle"],
        eagle_groups=drafts,
    )


@pytest.mark.parametrize("name", CONFIGS)
async def test_every_prediction_equals_the_managers_hit(recordings: Path, name: str) -> None:
    config = CONFIGS[name]
    recording = read_hybrid_recording(recordings / f"{name}.jsonl.gz")
    groups = groups_of(config)
    largest = max(group.block_size for group in groups.values())
    model = NaiveReuse(recording.block_size, groups, alignment=largest // recording.block_size)
    index = MemoryIndex()
    worker = SocketlessWorker(settings_of(config), index)
    await worker.send()
    wrong = []
    hits = 0
    for step in recording.steps:
        if isinstance(step, Batch):
            model.fold(step.payload)
            await worker.take(step.payload)
        elif isinstance(step, Ask):
            naive = model.reusable(step.tokens, lookahead=recording.lookahead)
            routed = await worker.usable_tokens(Prompt.of_tokens(Scope("hybrid", "hybrid"), step.tokens))
            hits += step.hit > 0
            safe = routed < step.hit and name.startswith(UNDER_REPORTED)
            if naive != step.hit or not (routed == step.hit or safe):
                wrong.append((len(step.tokens), naive, routed, step.hit))
    await worker.check()
    assert not wrong, f"{len(wrong)} of {ASKS} wrong (prompt, naive, routed, real): {wrong[:5]}"
    assert hits > ASKS // 4
