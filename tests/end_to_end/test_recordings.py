"""Recorded bytes of real engines go over real ZMQ, through sidecars, NATS and an indexer into Valkey: the export is exactly
what each engine could use, and a router that hashes a prompt's tokens itself finds it.

All recordings together, for one model: vLLM 0.11 to 0.33 with integer and bytes hashes (each with its own hash seed), a hybrid
model, SGLang with and without a host tier.
"""

import json
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from kvatlas.blocks.tiers import Tier, parse_tier
from kvatlas.fleet.records import EngineKind
from kvatlas.identity import Scope
from kvatlas_publishers.engine_events import EngineHash, EngineStored
from kvatlas_publishers.engines import decode_batch
from kvatlas_publishers.ledger.ledger import Ledger, LedgerSettings
from router_client import Prompt, RouterClient, RouterSettings
from tests.end_to_end.processes import query, service
from tests.eventually import until
from tests.publishers.fake_engine import RECORDINGS, FakeEngine, recording

pytestmark = pytest.mark.anyio

NAMES = sorted(path.name.removesuffix(".jsonl.gz") for path in RECORDINGS.glob("*.jsonl.gz"))
MODEL = "recorded-model"

ADAPTER_IDS = {"1": "1", "2": "2"}
"""For the recording of an engine that does not report adapters' names."""
Line = tuple[str | None, str, str]
"""adapter, tier, sequence hash"""


def worker_of(name: str) -> str:
    return name.replace(".", "-")


def usable_blocks(head: dict[str, Any]) -> set[tuple[Tier, EngineHash]]:
    """The part of the recorded residency that a publisher announces: (tier, engine hash)."""
    found = set()
    for medium, engine_hash in head["expected_usable"]:
        tier = parse_tier(medium) if isinstance(medium, str) else Tier.HBM
        found.add((tier, bytes.fromhex(engine_hash) if isinstance(engine_hash, str) else engine_hash))
    return found


def expected_lines(kind: EngineKind, head: dict[str, Any], payloads: Sequence[bytes]) -> set[Line]:
    """`expected_usable` as export prints it: engine hashes are converted to ours with the tokens in the recording."""
    ledger = Ledger(LedgerSettings(MODEL, MODEL, adapter_ids=ADAPTER_IDS))
    for payload in payloads:
        ledger.fold(decode_batch(kind, payload))
    ours = {
        (tier, engine_hash): (ledger.uses[scope_id].scope.adapter_id, tier.label, f"{sequence_hash:016x}")
        for scope_id, tier, engine_hash, sequence_hash in ledger.announced()
    }
    return {ours[key] for key in usable_blocks(head)}


def prompts_by_hash(kind: EngineKind, payloads: Sequence[bytes]) -> dict[EngineHash, tuple[str | None, list[int]]]:
    """(adapter, all tokens from the prompt's start) of each block of a recording that has no extra keys."""
    found: dict[EngineHash, tuple[str | None, list[int]]] = {}
    for payload in payloads:
        for event in decode_batch(kind, payload).events:
            if not isinstance(event, EngineStored) or not event.token_ids or event.salt:
                continue
            if any(event.extra_keys or ()) or (event.parent is not None and event.parent not in found):
                continue
            before = found[event.parent][1] if event.parent is not None else []
            for i, engine_hash in enumerate(event.hashes):
                found[engine_hash] = (event.adapter, before + list(event.token_ids[: (i + 1) * event.block_size]))
    return found


async def test_the_export_of_every_recording_is_what_its_engine_could_use(
    fresh_nats: str, fresh_valkey: str, tmp_path: Path
) -> None:
    servers = ["--nats-url", fresh_nats, "--redis-url", fresh_valkey]
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(service("indexer", *servers, ready="is ready", cwd=tmp_path))
        expected: dict[str, set[Line]] = {}
        for name in NAMES:
            head, payloads = recording(name)
            kind = EngineKind(head["engine"])
            engine = await stack.enter_async_context(FakeEngine())
            args = ["--engine", kind.value, "--endpoint", engine.endpoint, "--replay-endpoint", engine.replay_endpoint]
            args += ["--nats-url", fresh_nats, "--worker-id", worker_of(name), "--model-id", MODEL]
            args += ["--adapter-ids", ",".join(f"{id}={adapter}" for id, adapter in ADAPTER_IDS.items())]
            await stack.enter_async_context(service("publish", *args, ready="is published", cwd=tmp_path))
            await engine.subscribed()
            await engine.send(*payloads)
            expected[name] = expected_lines(kind, head, payloads)

        assert all(expected.values())

        async def export() -> dict[str, set[Line]]:
            out = await query("export", "--redis-url", fresh_valkey)
            assert len(set(out.splitlines())) == len(out.splitlines())
            found: dict[str, set[Line]] = {worker_of(name): set() for name in NAMES}
            for line in map(json.loads, out.splitlines()):
                assert line["model_id"] == MODEL
                found[line["worker"]].add((line["adapter_id"], line["tier"], line["sequence_hash"]))
            return found

        async def is_exact() -> bool:
            return await export() == {worker_of(name): lines for name, lines in expected.items()}

        await until(is_exact, deadline_s=60, what="every recording is exported exactly")

        async with RouterClient.open(fresh_valkey, RouterSettings(deadline_ms=None)) as router:
            for name in NAMES:
                head, payloads = recording(name)
                kind = EngineKind(head["engine"])
                prompts = prompts_by_hash(kind, payloads)
                in_hbm = [key for tier, key in usable_blocks(head) if tier is Tier.HBM and key in prompts]
                assert len(in_hbm) > 10
                for engine_hash in in_hbm:
                    adapter, tokens = prompts[engine_hash]
                    found = await router.overlap(Prompt.of_tokens(Scope(MODEL, MODEL, adapter), tokens))
                    mine = found.of(worker_of(name))
                    assert mine is not None
                    assert mine.resident_tokens == len(tokens), f"{name}: {engine_hash!r}"
