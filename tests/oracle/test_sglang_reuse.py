"""Compares what a router finds of every prompt with what SGLang's own radix cache matches, for each version.

From 0.5.7 on they are equal. 0.5.6 holds more than it announces, and earlier versions can't be followed: nothing is claimed
for them. Prompts with keys that events don't show are upper bounds, and are labelled as such.
"""

import json
from base64 import b64decode
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from kvatlas.fleet.records import EngineKind
from kvatlas.identity import Scope
from kvatlas.index.memory.index import MemoryIndex
from kvatlas_publishers.settings import PublisherSettings
from router_client import Prompt
from tests.end_to_end.socketless_worker import SocketlessWorker
from tests.oracle.conftest import SGLANG, run_recorder, select_names

pytestmark = pytest.mark.anyio

RECORDER = Path(__file__).parent / "record_sglang.py"
ASKS = 150
FIRST_PAIRS = (0, 5, 6)
"""The first version that, with EAGLE, keys its tree by pairs of tokens in events too."""
FIRST_EXACT = (0, 5, 7)


def number(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def grid() -> Iterator[tuple[str, dict[str, Any]]]:
    versions = sorted((path.name for path in SGLANG.iterdir() if path.is_dir()), key=number) if SGLANG else ()
    for version, page, eagle, namespaces in product(versions, (1, 16, 64), (False, True), (False, True)):
        if eagle and number(version) < FIRST_PAIRS:
            continue
        name = f"{version}-page{page}{'-eagle' if eagle else ''}{'-namespaces' if namespaces else ''}"
        config = {"page": page, "eagle": eagle, "pool": 40 * max(8, page), "asks": ASKS, "namespaces": namespaces}
        yield version, {"name": name, "seed": 1, **config}


CONFIGS = {config["name"]: (version, config) for version, config in grid()}


@pytest.fixture(scope="module")
def recorded(request: pytest.FixtureRequest) -> Callable[[str], list[dict[str, Any]]]:
    """The lines of a recording by its name. All recordings of a version that this run reads are made when the first one is
    read."""
    wanted = [CONFIGS[name] for name in select_names(request)]
    lines: dict[str, list[dict[str, Any]]] = {}

    def read(name: str) -> list[dict[str, Any]]:
        if name not in lines:
            lines.clear()
            version, _ = CONFIGS[name]
            assert SGLANG is not None
            printed = run_recorder(RECORDER, SGLANG / version, [config for of, config in wanted if of == version])
            for line in map(json.loads, printed.splitlines()):
                if "config" in line:
                    lines[line["config"]["name"]] = of_config = []
                else:
                    of_config.append(line)
        return lines[name]

    return read


@pytest.mark.parametrize("name", CONFIGS)
async def test_no_prompt_is_predicted_to_reuse_more_than_the_cache_matches(
    name: str, recorded: Callable[[str], list[dict[str, Any]]]
) -> None:
    version, config = CONFIGS[name]
    worker = SocketlessWorker(PublisherSettings(worker_id="w", model_id="m", engine=EngineKind.SGLANG), MemoryIndex())
    await worker.send()
    asked = hits = 0
    wrong = []
    for line in recorded(name):
        if "batch" in line:
            await worker.take(b64decode(line["batch"]))
        elif "ask" in line:
            keys = [[line["salt"]]] if line["salt"] else None
            prompt = Prompt.of_tokens(Scope("m", "m"), line["ask"], extra_keys=keys)
            found, hit = await worker.usable_tokens(prompt), line["hit"]
            asked += 1
            hits += hit > 0
            labelled = config["namespaces"] and found > hit and worker.ledger.reuse.upper_bound
            if found != hit and not labelled:
                wrong.append((len(line["ask"]), line["salt"], line["hidden"], found, hit))
    await worker.check()
    assert asked == ASKS and hits > ASKS // 10
    over = [one for one in wrong if one[-2] > one[-1]]
    assert not over, f"{len(over)} of {asked} over-claimed (prompt, salt, hidden, found, real): {over[:5]}"
    if number(version) < FIRST_PAIRS:
        assert not worker.ledger.announced_blocks and worker.ledger.counters.engine_too_old
    elif number(version) >= FIRST_EXACT:
        assert not wrong, f"{len(wrong)} of {asked} wrong (prompt, salt, hidden, found, real): {wrong[:5]}"
