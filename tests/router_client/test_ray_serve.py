"""Ray Serve with the example's request router: a real deployment, in a separate environment."""

import json
import os
import subprocess
from pathlib import Path

import anyio
import pytest
from anyio.streams.text import TextReceiveStream

from kvatlas.blocks.hashing import extend_chain
from kvatlas.blocks.tiers import Tier
from kvatlas.events import ScopeUse
from kvatlas.fleet_store.fleet_store import FleetStore
from kvatlas.index.redis.index import open_redis_index
from kvatlas.store.connection import Store
from tests.router.proxy.engines import BLOCK_SIZE, MODEL, SCOPE, record
from tests.router.tokens.small_model import save_simulators

PYTHON = os.environ.get("KVATLAS_RAY", "")
pytestmark = [
    pytest.mark.anyio,
    pytest.mark.timeout(400),
    pytest.mark.skipif(
        not PYTHON,
        reason="Ray Serve brings 80 packages with versions of its own; `make integrations` installs it beside kvatlas",
    ),
]

ROOT = Path(__file__).parents[2]
REPLICAS = 3
PROMPT = "The cache holds blocks of tokens; a router asks which worker holds the most of them. " * 2


async def test_requests_go_to_the_replica_that_holds_their_prompt(
    store: Store, valkey_url: str, tmp_path: Path
) -> None:
    index = await open_redis_index(store, writer=True)
    arguments = [valkey_url, MODEL, str(save_simulators(tmp_path)), str(REPLICAS)]
    async with await anyio.open_process(
        [PYTHON, "-m", "tests.router_client.ray_serve_replicas", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0"},
        stderr=subprocess.DEVNULL,
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        lines = _Lines(TextReceiveStream(process.stdout))
        ids = json.loads(await lines.next())
        assert len(ids) == REPLICAS
        await FleetStore(store).write({id: record(id, "http://127.0.0.1:1") for id in ids})
        for holder in ids:
            prompt = f"{holder}: {PROMPT}"
            await index.put(
                ScopeUse(SCOPE, BLOCK_SIZE, 1024), holder, Tier.HBM, extend_chain(list(prompt.encode()), BLOCK_SIZE)
            )
            for _ in range(4):
                await process.stdin.send(json.dumps(prompt).encode() + b"\n")
                assert await lines.next() == holder
        await process.stdin.aclose()
        assert await process.wait() == 0


class _Lines:
    def __init__(self, stream: TextReceiveStream) -> None:
        self._stream = stream
        self._text = ""

    async def next(self) -> str:
        while "\n" not in self._text:
            self._text += await self._stream.receive()
        line, _, self._text = self._text.partition("\n")
        return line
