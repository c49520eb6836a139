"""Real clients through the router: SDKs in their own Python, curl, and coding agents' command lines."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.end_to_end.processes import ROOT
from tests.frontends.clients import CLIENTS, SAYS
from tests.frontends.fleet import Fleet, environment_folder

ANSWERS = {
    "openai_tools": 'weather{"city": "Rome"}',
    "anthropic_tools": "weather Rome",
    "anthropic_refused": "404 not_found_error",
}
QUESTION = f"Who holds it? [[say {SAYS}]]"


@pytest.mark.parametrize("client", CLIENTS)
def test_an_sdk_gets_its_answer(fleet: Fleet, model: str, client: str) -> None:
    python = str(environment_folder("clients") / "bin/python")
    words = [python, "-m", "tests.frontends.clients", client, fleet.router, model]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    expected = " ".join(sorted(fleet.engines)) if client == "openai_models" else ANSWERS.get(client, SAYS)
    assert done.stdout.strip() == expected


def test_curl_reads_a_stream_to_its_end(fleet: Fleet, model: str) -> None:
    body = f'{{"model": "{model}", "stream": true, "messages": [{{"role": "user", "content": "hello"}}]}}'
    header = ("-H", "content-type: application/json", "-d", body)
    done = subprocess.run(
        ["curl", "-sSN", f"{fleet.router}/v1/chat/completions", *header], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith("data: [DONE]\n\n")


@pytest.fixture
def agents(tmp_path: Path) -> dict[str, str]:
    """The environment of a coding agent that contacts nothing but its base URL."""
    if shutil.which("npm") is None:
        pytest.skip("no npm on this machine")
    quiet = dict.fromkeys(("CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC", "DISABLE_AUTOUPDATER", "DISABLE_TELEMETRY"), "1")
    (tmp_path / ".codex").mkdir()
    return {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "ANTHROPIC_AUTH_TOKEN": "none", **quiet}


def _agent(name: str) -> str:
    return str(environment_folder("npm") / "node_modules/.bin" / name)


def test_claude_code_gets_its_answer(fleet: Fleet, agents: dict[str, str], tmp_path: Path) -> None:
    words = [_agent("claude"), "-p", QUESTION, "--model", "vllm-small", "--output-format", "stream-json", "--verbose"]
    where = {**agents, "ANTHROPIC_BASE_URL": fleet.router}
    done = subprocess.run(
        words, cwd=tmp_path, env=where, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, done.stderr + done.stdout
    assert SAYS in done.stdout.replace(QUESTION, "")


def test_codex_gets_its_answer(fleet: Fleet, agents: dict[str, str], tmp_path: Path) -> None:
    provider = f'model_providers.kv={{name="kv",base_url="{fleet.router}/v1",wire_api="responses"}}'
    words = [
        _agent("codex"),
        "exec",
        "--skip-git-repo-check",
        "-c",
        "model_provider=kv",
        "-c",
        provider,
        "-m",
        "vllm-small",
        QUESTION,
    ]
    done = subprocess.run(
        words, cwd=tmp_path, env=agents, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, done.stderr + done.stdout
    assert SAYS in done.stdout.replace(QUESTION, "")
