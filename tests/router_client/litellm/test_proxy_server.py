"""LiteLLM's proxy server, a process of its own, with its deployments chosen by kvatlas."""

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from kvatlas.embedded.free_port import free_port
from kvatlas.store.connection import Store
from tests.eventually import until
from tests.router_client.proxy.engines import MODEL, SCOPE, running_fleet
from tests.router_client.tokens.small_model import save_simulators

PYTHON = os.environ.get("KVATLAS_LITELLM_PROXY", "")
pytestmark = [
    pytest.mark.anyio,
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        not PYTHON,
        reason="LiteLLM's extra `proxy` needs rich below 14, boto3 and an older fastapi, which can't be installed beside the "
        "other extras; set KVATLAS_LITELLM_PROXY to the Python of an environment with kvatlas and litellm[proxy]",
    ),
]

PROMPT = "The cache holds blocks of tokens; a router asks which worker holds the most of them. " * 2
START_S = 200
"""Importing LiteLLM's proxy takes half a minute on a busy machine."""


@contextmanager
def running_process(command: list[str], environment: dict[str, str], folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Its output is in the folder's file `log`."""
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, env=environment, cwd=folder, stdout=log, stderr=log)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(30)


async def test_the_proxy_s_requests_go_where_their_prompt_is_cached(
    store: Store, valkey_url: str, tmp_path: Path
) -> None:
    async with running_fleet(store, {"w1": {}, "w2": {}, "w3": {}}) as fleet:
        await fleet.holds("w2", list(PROMPT.encode()))
        config = {
            "model_list": [
                {
                    "model_name": "chat",
                    "litellm_params": {"model": f"hosted_vllm/{MODEL}", "api_base": f"{url}/v1", "api_key": "none"},
                }
                for url in fleet.urls.values()
            ],
            "litellm_settings": {"callbacks": "router_client.litellm.proxy_server.routing"},
        }
        (tmp_path / "config.yaml").write_text(json.dumps(config))
        port = free_port()
        environment = {
            **os.environ,
            "KVATLAS_REDIS_URL": valkey_url,
            "KVATLAS_TOKENIZER": str(save_simulators(tmp_path)),
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "PYTHONPATH": str(Path(__file__).parents[3]),
        }
        command = [PYTHON, "-c", "import litellm; litellm.run_server()", "--config", str(tmp_path / "config.yaml")]
        command += ["--host", "127.0.0.1", "--port", str(port)]
        with running_process(command, environment, tmp_path) as process:
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30) as client:

                async def ready() -> bool:
                    assert process.poll() is None, (tmp_path / "log").read_text()[-4_000:]
                    try:
                        return (await client.get("/health/liveliness")).status_code == 200
                    except httpx.TransportError:
                        return False

                await until(ready, what="LiteLLM's proxy listens", deadline_s=START_S)
                bases: list[str] = []

                async def settled() -> bool:
                    """Some choices fall open on a busy machine, which needs more than 10 ms to ask the store."""
                    body = {"model": "chat", "prompt": PROMPT, "max_tokens": 2}
                    answer = await client.post("/v1/completions", json=body)
                    assert answer.status_code == 200, answer.text
                    bases.append(answer.headers["x-litellm-model-api-base"])
                    return bases[-5:] == [f"{fleet.urls['w2']}/v1"] * 5

                await until(
                    settled, what="five requests in a row go to the worker that holds their prompt", deadline_s=60
                )

                async def all_ended() -> bool:
                    return not await store.client.hlen(f"kva:{{pool:{SCOPE.pool_id}}}:reservations.2")

                await until(all_ended, what="every booking has ended", deadline_s=30)
