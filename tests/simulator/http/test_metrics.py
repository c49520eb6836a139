"""The metrics page has vLLM's names."""

import time

import pytest

from tests.simulator.running_engine import running_engine, scrape_metrics

pytestmark = pytest.mark.anyio

PROMPT = list(range(300, 310))


async def test_metrics_have_the_names_of_vllm() -> None:
    before = time.time()
    async with running_engine(model="m") as (_, client):
        for _ in range(2):
            await client.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 2})
        found = await scrape_metrics(client)
        labels = {"engine": "0", "model_name": "m"}
        assert found["vllm:num_requests_running"] == (0, labels)
        assert found["vllm:num_requests_waiting"] == (0, labels)
        assert found["vllm:kv_cache_usage_perc"] == (0, labels)
        assert found["vllm:prefix_cache_queries_total"] == (20, labels)
        assert found["vllm:prefix_cache_hits_total"] == (8, labels)
        value, config = found["vllm:cache_config_info"]
        assert value == 1 and (config["block_size"], config["num_gpu_blocks"]) == ("4", "64")
        assert before - 1 <= found["process_start_time_seconds"][0] <= time.time()
        assert (await client.get("/health")).status_code == 200
