"""An engine whose blocks have a different size in host memory: each size is used where it belongs, from the engine's events to
the price of a choice. The events are those of a recorded SGLang with a host tier, in the open form, which has sizes."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from kvatlas.blocks.tiers import Tier
from kvatlas.cost.engine import EngineRates
from kvatlas.cost.protocol import Piece
from kvatlas.embedded.free_port import free_port
from kvatlas.fleet.records import EngineKind
from kvatlas.identity import Scope
from kvatlas_publishers.engine_events import EngineEvent, EngineRemoved, EngineStored
from kvatlas_publishers.engines import decode_batch
from router_client import Prompt, RouterClient, RouterSettings
from tests.end_to_end.processes import query, service
from tests.eventually import until
from tests.http_client import http_client
from tests.publishers.fake_engine import recording

pytestmark = pytest.mark.anyio

SIZES = {Tier.HBM: 3 << 20, Tier.CPU_DRAM: 1 << 20}
SCOPE = Scope("m", "m")
LOAD = {"kv_total_blocks": 4096, "kv_active_blocks": 100}


def open_event(event: EngineEvent) -> dict[str, Any]:
    """The event in the open form."""
    if isinstance(event, EngineRemoved):
        return {"type": "block_removed", "block_hashes": list(event.hashes), "medium": event.tier.label}
    if not isinstance(event, EngineStored):
        return {"type": "all_blocks_cleared"}
    return {
        "type": "block_stored",
        "block_hashes": list(event.hashes),
        "parent_block_hash": event.parent,
        "token_ids": list(event.token_ids),
        "block_size": event.block_size,
        "medium": event.tier.label,
        "bytes_per_block": SIZES[event.tier],
    }


def recorded_lines() -> tuple[bytes, list[int], int]:
    """The recording's batches, one per line, without other tenants' prompts; the tokens of a prompt that ends with blocks in
    host memory alone; and the number of these blocks."""
    head, payloads = recording("sglang-0.5.23-host")
    held: dict[Tier, set[object]] = {tier: set() for tier in SIZES}
    chains: dict[object, tuple[list[object], list[int]]] = {}
    lines = []
    for payload in payloads:
        events = [e for e in decode_batch(EngineKind(head["engine"]), payload).events if not getattr(e, "salt", None)]
        lines.append(json.dumps({"engine_id": "e", "events": list(map(open_event, events))}))
        for event in events:
            if isinstance(event, EngineStored):
                names, tokens = chains[event.parent] if event.parent is not None else ([], [])
                for at, name in enumerate(event.hashes, 1):
                    chains[name] = [*names, *event.hashes[:at]], [*tokens, *event.token_ids[: at * event.block_size]]
                held[event.tier].update(event.hashes)
            elif isinstance(event, EngineRemoved):
                held[event.tier].difference_update(event.hashes)
            else:
                held = {tier: set() for tier in SIZES}
    lines.append(json.dumps({"engine_id": "e", "events": [], "load": LOAD}))
    anywhere = held[Tier.HBM] | held[Tier.CPU_DRAM]
    whole = [chains[name] for name in held[Tier.CPU_DRAM] if anywhere.issuperset(chains[name][0])]
    in_host, tokens = max((sum(one not in held[Tier.HBM] for one in names), tokens) for names, tokens in whole)
    return "".join(f"{line}\n" for line in lines).encode(), tokens, in_host


async def test_export_sums_heartbeats_and_prices_have_each_tiers_own_size(
    fresh_nats: str, fresh_valkey: str, tmp_path: Path
) -> None:
    servers = ["--nats-url", fresh_nats, "--redis-url", fresh_valkey]
    port = free_port()
    lines, tokens, in_host = recorded_lines()
    publish = ["publish", "--engine", "open", "--status-port", str(port), "--nats-url", fresh_nats, "--worker-id", "w"]
    async with (
        service("indexer", *servers, ready="is ready", cwd=tmp_path),
        service(*publish, "--model-id", "m", ready="is published", cwd=tmp_path),
        RouterClient.open(fresh_valkey, RouterSettings(deadline_ms=None)) as router,
    ):
        async with http_client(base_url=f"http://127.0.0.1:{port}") as page:
            for line in lines.splitlines():
                assert (await page.post("/events", content=line)).status_code == 200

        async def exported() -> Counter[tuple[str, int]]:
            lines = (await query("export", *servers)).splitlines()
            return Counter((line["tier"], line["bytes"]) for line in map(json.loads, lines))

        async def all_is_known() -> bool:
            """The load comes last; by then the index has as many blocks as the publisher counts."""
            worker = (await router.workers(SCOPE)).get("w")
            if worker is None or worker.load is None or not worker.load.cpu_used_bytes:
                return False
            assert {tier: worker.endpoint.bytes_in(tier.label) for tier in SIZES} == SIZES
            size = SIZES[Tier.CPU_DRAM]
            return worker.load.cpu_used_bytes == (await exported())["cpu_dram", size] * size

        await until(all_is_known, deadline_s=60, what="the recording is in the index")
        blocks = await exported()
        assert blocks.keys() == {(tier.label, size) for tier, size in SIZES.items()}
        summed = [json.loads(line) for line in (await query("export", "--summary", *servers)).splitlines()]
        assert {(row["tier"], row["blocks"], row["bytes"]) for row in summed} == {
            (tier, count, count * size) for (tier, size), count in blocks.items()
        }
        async with router.route(Prompt.of_tokens(SCOPE, [*tokens, 0])) as choice:
            explained = choice.ranking.results[0]
        [read_us] = [term.us for term in explained.terms if term.name == "transfer"]
        read = Piece(16 * in_host, in_host * SIZES[Tier.CPU_DRAM], Tier.CPU_DRAM)
        assert in_host > 0 and read_us == round(EngineRates().read_us(read))
