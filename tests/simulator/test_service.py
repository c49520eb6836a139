"""A whole engine stops properly, and names an address that is in use."""

import anyio
import pytest

from kvatlas.errors import SettingsError
from kvatlas_simulator.service import run_engine
from tests.http_client import http_client
from tests.simulator.running_engine import engine_settings, running_engine, wait_for_requests

pytestmark = pytest.mark.anyio

PROMPT = list(range(300, 310))


async def test_a_stopping_engine_ends_open_responses_and_frees_its_ports() -> None:
    statuses = []

    async def post_completion(url: str) -> None:
        async with http_client(base_url=url, timeout=60) as own:
            statuses.append((await own.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 50})).status_code)

    async with anyio.create_task_group() as tasks, running_engine(speed_up=0.01) as (addresses, client):
        tasks.start_soon(post_completion, addresses.base_url)
        await wait_for_requests(client, running=1)
    assert statuses == [503]
    port = int(addresses.base_url.rpartition(":")[2])
    async with running_engine(port=port, endpoint=addresses.endpoint, replay_endpoint=addresses.replay_endpoint) as (
        again,
        _,
    ):
        assert again == addresses


async def test_a_port_in_use_is_one_clear_line() -> None:
    async with running_engine() as (addresses, _):
        port = int(addresses.base_url.rpartition(":")[2])
        with pytest.raises(SettingsError, match=f"can't listen on 127.0.0.1:{port}: Address already in use"):
            await run_engine(engine_settings(port=port))
