"""The KV event feed as a publisher receives it: over real ZMQ sockets, from an engine that serves real HTTP requests."""

from collections import Counter

import anyio
import httpx
import pytest
import zmq
import zmq.asyncio

from kvatlas.errors import SettingsError
from kvatlas_simulator.cache.kv_events import GpuCleared
from kvatlas_simulator.zmq_events import EventEncoding, FeedSettings, open_feed
from tests.simulator.running_engine import Batch, fold, listening, replayed, running_engine

pytestmark = pytest.mark.anyio


async def complete(client: httpx.AsyncClient, prompt: list[int], **more: object) -> dict[str, object]:
    response = await client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 1, **more})
    assert response.status_code == 200, response.text
    body: dict[str, object] = response.json()
    return body


async def test_a_stored_run_is_encoded_as_in_vllm() -> None:
    async with running_engine(topic="kv") as (addresses, client), listening(addresses, client) as listener:
        await complete(client, list(range(9)))
        batch = await listener.next_batch()
        (event,) = batch.events
        hashes = event.pop("block_hashes")
        assert batch.topic == b"kv"
        assert len(hashes) == 2 and all(0 <= block_hash < 2**64 for block_hash in hashes)
        assert event == {
            "type": "BlockStored",
            "parent_block_hash": None,
            "token_ids": list(range(8)),
            "block_size": 4,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": None,
            "extra_keys": [None, None],
            "group_idx": 0,
            "kv_cache_spec_kind": "full_attention",
        }
        await complete(client, list(range(13)))
        (continued,) = (await listener.next_batch()).events
        assert continued["parent_block_hash"] == hashes[1] and continued["token_ids"] == [8, 9, 10, 11]


async def test_events_name_adapters_and_salts() -> None:
    async with running_engine(adapters="first,second") as (addresses, client), listening(addresses, client) as listener:
        await complete(client, list(range(9)), model="second", cache_salt="tenant-1")
        (event,) = (await listener.next_batch()).events
        assert (event["lora_id"], event["lora_name"]) == (2, "second")
        assert event["extra_keys"] == [["second", "tenant-1"], ["second"]]


async def test_seqs_are_contiguous_and_each_removal_is_an_event_of_its_own() -> None:
    async with (
        running_engine(num_gpu_blocks=4) as (addresses, client),
        listening(addresses, client) as listener,
    ):
        await complete(client, list(range(13)))
        stored = (await listener.next_batch()).events[0]["block_hashes"]
        await complete(client, list(range(100, 109)))
        second = await listener.next_batch()
        assert [event["type"] for event in second.events] == ["BlockRemoved", "BlockRemoved", "BlockStored"]
        removed = [event["block_hashes"] for event in second.events[:2]]
        assert removed == [[stored[2]], [stored[1]]]
        assert second.events[0].keys() == {"type", "block_hashes", "medium", "group_idx"}
        assert second.seq == listener.batches[0].seq + 1


async def test_events_of_the_cpu_tier_carry_tokens_or_are_placeholders() -> None:
    for self_describing in (True, False):
        async with (
            running_engine(num_gpu_blocks=3, num_cpu_blocks=8, self_describing_offload=self_describing) as (
                addresses,
                client,
            ),
            listening(addresses, client) as listener,
        ):
            await complete(client, list(range(5)))
            (stored,) = (await listener.next_batch()).events
            await complete(client, list(range(100, 109)))
            swapped, removed, _ = (await listener.next_batch()).events
            assert swapped["block_hashes"] == removed["block_hashes"] == stored["block_hashes"]
            assert (swapped["medium"], removed["medium"]) == ("CPU", "GPU")
            if self_describing:
                assert {**swapped, "medium": "GPU"} == stored
            else:
                assert (swapped["token_ids"], swapped["block_size"]) == ([], 0) and "group_idx" not in swapped


async def test_a_reset_is_published_at_once() -> None:
    async with running_engine() as (addresses, client), listening(addresses, client) as listener:
        await complete(client, list(range(9)))
        await listener.next_batch()
        assert (await client.post("/reset_prefix_cache")).status_code == 200
        assert (await listener.next_batch()).events == [{"type": "AllBlocksCleared"}]
        assert not listener.copies


async def test_replay_sends_the_same_payloads_from_any_seq_on() -> None:
    async with running_engine() as (addresses, client), listening(addresses, client) as listener:
        assert addresses.replay_endpoint is not None
        for start in range(0, 500, 100):
            await complete(client, list(range(start, start + 9)))
            await listener.next_batch()
        seen = listener.batches
        whole = await replayed(addresses.replay_endpoint, 0)
        assert [batch.seq for batch in whole] == list(range(seen[-1].seq + 1))
        assert whole[-5:] == seen
        assert await replayed(addresses.replay_endpoint, seen[3].seq) == seen[3:]
        assert await replayed(addresses.replay_endpoint, seen[-1].seq + 1) == []


async def test_replay_has_only_the_last_batches() -> None:
    async with running_engine(buffer_steps=3) as (addresses, client):
        assert addresses.replay_endpoint is not None
        for start in range(0, 500, 100):
            await complete(client, list(range(start, start + 9)))
        assert [batch.seq for batch in await replayed(addresses.replay_endpoint, 0)] == [2, 3, 4]


async def test_a_malformed_replay_request_is_ignored() -> None:
    async with running_engine() as (addresses, _):
        assert addresses.replay_endpoint is not None
        context = zmq.asyncio.Context()
        dealer = context.socket(zmq.DEALER)
        try:
            dealer.connect(addresses.replay_endpoint)
            for frames in ((b"x",), (b"", b"short"), (b"", b"12345678", b"more"), (b"x", b"12345678")):
                await dealer.send_multipart(frames)
            await dealer.send_multipart((b"", (0).to_bytes(8, "big")))
            with anyio.fail_after(60):
                assert (await dealer.recv_multipart())[2] == b"\xff" * 8
        finally:
            dealer.close(linger=0)
            context.term()


async def test_the_feed_folds_to_the_engines_own_block_counts_under_load() -> None:
    async with running_engine(num_gpu_blocks=24, num_cpu_blocks=10, max_num_batched_tokens=32) as (addresses, client):

        async def user(number: int) -> None:
            prompt = [number % 3 + 300] * 10
            for turn in range(4):
                body = await complete(client, prompt, max_tokens=5, n=1 + number % 2, return_token_ids=True)
                choices = body["choices"]
                assert isinstance(choices, list)
                prompt = [*prompt, *choices[0]["token_ids"], number, turn]

        async with anyio.create_task_group() as users:
            for number in range(8):
                users.start_soon(user, number)
        assert addresses.replay_endpoint is not None
        batches: list[Batch] = await replayed(addresses.replay_endpoint, 0)
        copies: Counter[tuple[int, str]] = Counter()
        for batch in batches:
            assert batch.events, "an empty batch"
            fold(copies, batch)
        page = (await client.get("/metrics")).text
        held = Counter[str]()
        for (_, medium), count in copies.items():
            held[medium] += count
        for medium, metric in (("GPU", "cached_blocks"), ("CPU", "cpu_blocks")):
            assert f'kvatlas_simulator:{metric}{{engine="0",model_name="mock-model"}} {held[medium]}.0\n' in page
        assert "vllm:num_requests_running{" in page and held["GPU"] > 10


async def test_the_event_socket_connects_and_binds_as_in_vllm() -> None:
    context = zmq.asyncio.Context()
    subscription = context.socket(zmq.SUB)
    try:
        port = subscription.bind_to_random_port("tcp://127.0.0.1")
        subscription.setsockopt(zmq.SUBSCRIBE, b"")
        settings = FeedSettings(f"tcp://127.0.0.1:{port}", bind=False)
        async with open_feed(EventEncoding(4), settings) as feed:
            with anyio.fail_after(60):
                while not await subscription.poll(20):
                    await feed.publish((GpuCleared(),))
                topic, _, _ = await subscription.recv_multipart()
            assert topic == b"" and feed.replay_endpoint is None
        async with open_feed(EventEncoding(4), FeedSettings("tcp://127.0.0.1:*", bind=False)) as feed:
            assert not feed.endpoint.endswith("*"), "vLLM binds an endpoint with a star"
    finally:
        subscription.close(linger=0)
        context.term()


async def test_an_endpoint_in_use_is_one_clear_line() -> None:
    async with open_feed(EventEncoding(4), FeedSettings("tcp://127.0.0.1:0")) as feed:
        line = rf"KV events can't listen on {feed.endpoint} \(--endpoint\): Address already in use$"
        with pytest.raises(SettingsError, match=line):
            async with open_feed(EventEncoding(4), FeedSettings(feed.endpoint)):
                pass
