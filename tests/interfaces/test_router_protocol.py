"""The router protocol: its event payloads decode to the same values, and its request is answered with its own names."""

import json

import pytest

from kvatlas.store.connection import Store
from kvatlas_publishers.engine_events import EngineDropped, EngineStored
from kvatlas_publishers.engines.open_events import batch_of
from tests.router.proxy.engines import running_fleet, running_proxy

pytestmark = pytest.mark.anyio

PROMPT = list(range(1_000, 3_001))


def test_hashes_and_events_are_read_as_they_are_written() -> None:
    written = json.loads(
        '{"events": [{"event_id": 1, "data": {"stored": {"parent_hash": 1, "blocks": '
        '[{"block_hash": 2, "tokens_hash": 3}]}}}, {"event_id": 2, "data": {"removed": {"block_hashes": [4, 5]}}}], '
        '"shutdown": false}'
    )
    batch = batch_of(written)
    stored, removed = batch.events
    assert isinstance(stored, EngineStored) and isinstance(removed, EngineDropped) and batch.header is not None
    assert (stored.parent, stored.hashes, removed.hashes) == (1, [2], [4, 5])
    assert stored.local_hashes is not None and stored.local_hashes.hashes == [3]
    assert [event_id for event_id, _ in batch.header.event_ids] == [1, 2] and not batch.header.shutdown


async def test_a_request_of_tokens_is_answered_with_the_selected_worker(store: Store, valkey_url: str) -> None:
    async with running_fleet(store, {"1": {}, "-1": {}, "w2": {}}) as fleet, running_proxy(valkey_url) as client:

        async def select(**body: object) -> dict[str, object]:
            answer = await client.post("/kvatlas/select", json=body)
            found: dict[str, object] = answer.json()
            return found

        await fleet.holds("w2", PROMPT)
        chosen = await select(tokens=PROMPT)
        required = chosen["required_blocks"]
        assert chosen == {"worker_id": "w2", "required_blocks": required, "overlap_blocks": int(str(required)) - 1}
        for worker_id in (1, -1):  # an id that is a number stays a number
            cold = await select(tokens=list(range(64)), allow=[str(worker_id)])
            assert (cold["worker_id"], cold["overlap_blocks"]) == (worker_id, 0)
        assert (await client.get("/status")).json()["held"] == 0  # nothing is booked
        for body, line in (({}, "tokens is missing"), ({"tokens": ["a"]}, "request field tokens.0")):
            error = await select(**body)
            assert line in str(error["error"])
