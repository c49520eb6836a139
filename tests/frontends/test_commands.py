"""`up` and doctor with the engines' own servers, and the index of what these really hold."""

import json
import subprocess
import sys
from typing import Any

import httpx

from tests.end_to_end.processes import ROOT, environment
from tests.eventually import until_sync
from tests.frontends.bodies import asks
from tests.frontends.fleet import BLOCK_SIZE, Fleet


def _kvatlas(fleet: Fleet, *words: str) -> Any:
    command = [sys.executable, "-m", "kvatlas_cli.main", *words, "--json"]
    done = subprocess.run(
        command, cwd=ROOT, env=environment(**fleet.variables), capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr + done.stdout
    return json.loads(done.stdout)


def test_up_found_the_events_of_every_engine(fleet: Fleet, router: httpx.Client) -> None:
    for model in fleet.engines:
        assert router.post("/v1/chat/completions", json={"model": model, **asks()}).status_code == 200

    def held() -> bool:
        workers = _kvatlas(fleet, "workers")
        assert sorted(one["kind"] for one in workers) == ["sglang", "vllm", "vllm"]
        return {one["kind"] for one in workers if one["blocks"]} == {"sglang", "vllm"}

    until_sync(held, what="an engine of each kind is known to hold blocks")


def test_doctor_finds_no_fault(fleet: Fleet, router: httpx.Client) -> None:
    assert [one for one in _kvatlas(fleet, "doctor") if one["level"] not in ("ok", "info")] == []


def test_a_prefix_goes_to_the_engine_that_holds_it(fleet: Fleet, router: httpx.Client) -> None:
    """The prefix is sent to one engine without the router, so only its KV events can show that it has it. The router is asked
    once they are indexed."""

    def blocks_of(worker: str) -> int:
        return next(int(one["blocks"]) for one in _kvatlas(fleet, "workers") if one["worker"] == worker)

    for place, engine in enumerate(fleet.engines["vllm-small"]):
        text = f"{place} is where this long prefix was computed. " * 8
        body = {"model": "vllm-small", **asks(text)}
        worker = engine.url.removeprefix("http://").replace(".", "-").replace(":", "-")
        before = blocks_of(worker)
        answer = httpx.post(f"{engine.url}/v1/chat/completions", json=body, trust_env=False).raise_for_status().json()
        whole = before + answer["usage"]["prompt_tokens"] // 16 - 2  # the template's head may be there already

        def indexed(worker: str = worker, whole: int = whole) -> bool:
            return blocks_of(worker) >= whole

        until_sync(indexed, what=f"the prefix of {worker} is indexed")
        words = router.post("/v1/chat/completions", json=body).headers["x-kvatlas-decision"].split(";")
        assert words[0] == f'"{worker}"', words
        assert int(words[1].removeprefix("cached=")) >= 2 * BLOCK_SIZE, words
