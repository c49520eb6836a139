"""`kvatlas doctor --request` follows one prompt to what each worker holds of it."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from kvatlas.bus.access import NatsAccess
from kvatlas.embedded import ServerProcess
from kvatlas.identity import DEFAULT_TENANT
from kvatlas.store.access import RedisAccess
from kvatlas_cli.doctor import Finding, Level, follow_request, read_request
from tests.eventually import until
from tests.http_client import http_client
from tests.kvatlas_cli.conftest import TOKENS, Cli, Done
from tests.kvatlas_cli.doctor.installation import MODEL, Installation


@pytest.fixture
def ask(cli: Cli, nats_server: ServerProcess, fleet_store_url: str, tmp_path: Path) -> "Ask":
    return Ask(cli, nats_server.url, fleet_store_url, tmp_path)


class Ask:
    """Runs the command for a request; in the store w1 holds four blocks of TOKENS and w2 the first."""

    def __init__(self, cli: Cli, nats_url: str, redis_url: str, folder: Path) -> None:
        self.cli, self.folder = cli, folder
        self.servers = ("--nats-url", nats_url, "--redis-url", redis_url, "--listen-s", "0.05")

    def __call__(self, request: object, *flags: str) -> Done:
        file = self.folder / "request.json"
        file.write_text(json.dumps(request))
        return self.cli("doctor", "--request", str(file), *self.servers, *flags)


def test_a_prompt_that_is_held_is_explained_worker_by_worker(ask: Ask) -> None:
    done = ask([*TOKENS, 99, 98, 97, 96, 95], "--model-id", "m")
    assert (done.code, done.err) == (0, "")
    assert "ok       request.prompt      prompt of 21 tokens, model m, tokenizer m, tenant default" in done.out
    assert (
        "w1: 4 of 6 blocks, 16 tokens resident (16 in hbm), 16 usable; block 4 (from token 16) was never stored"
        in done.out
    )
    assert "w2: 1 of 6 blocks, 4 tokens resident (4 in cpu_dram), 4 usable; block 1 (from token 4)" in done.out
    assert "w1 would be chosen: " in done.out


def test_openai_requests_with_token_ids_and_hints_name_their_model_themselves(ask: Ask) -> None:
    for request in ({"model": "m", "prompt": TOKENS}, {"model_id": "m", "token_ids": TOKENS}):
        done = ask(request)
        assert done.code == 0 and "w1: 4 of 4 blocks" in done.out, done


def test_another_model_tokenizer_or_tenant_is_named_with_the_nearest(ask: Ask) -> None:
    done = ask({"model": "mm", "prompt": TOKENS})
    assert done.code == 1 and "no worker serves model mm; the nearest is m\n" in done.out
    done = ask(TOKENS, "--model-id", "m", "--tokenizer-id", "n")
    assert done.code == 1 and "no worker serves model m with tokenizer n; there are m\n" in done.out
    done = ask(TOKENS, "--model-id", "m", "--tenant-id", "acme")
    assert done.code == 1
    assert "no worker publishes blocks of its scope; the nearest has tenant default instead of acme" in done.out
    assert "w1 holds 16 tokens of it in another scope: tenant default instead of acme" in done.out


def test_a_first_token_that_only_one_tokenizer_adds_is_found(ask: Ask) -> None:
    done = ask([1_000, *TOKENS], "--model-id", "m")
    assert done.code == 1 and "w1 holds 16 tokens of it without its first token, 1000" in done.out


def test_a_prompt_that_nobody_computed_is_no_fault(ask: Ask) -> None:
    done = ask(list(range(500, 520)), "--model-id", "m")
    assert done.code == 0
    assert "w1: 0 of 5 blocks: it never stored the first 4 tokens in this scope, or has evicted them" in done.out
    done = ask([1, 2], "--model-id", "m")
    assert done.code == 0 and "the prompt is shorter than a block of 4 tokens" in done.out


def test_text_needs_an_engine_that_tokenizes_it(ask: Ask) -> None:
    done = ask({"model": "m", "prompt": "some text"})
    assert done.code == 1 and "no engine of m answered /tokenize" in done.out
    done = ask({"model": "mm", "prompt": "some text"})
    assert done.code == 1 and "prompt of unknown tokens, model mm" in done.out


@pytest.mark.anyio
async def test_what_was_never_taken_in_is_not_called_evicted(installation: Installation, tmp_path: Path) -> None:
    file = tmp_path / "request.json"
    file.write_text(json.dumps({"model": MODEL, "prompt": [*range(500, 520)]}))
    nats, redis = NatsAccess(installation.nats.url), RedisAccess(installation.valkey.url)
    async with installation.replicas("i"), installation.worker("w") as url, http_client(base_url=url) as client:
        await client.post("/v1/completions", json={"model": MODEL, "max_tokens": 1, "prompt": [*range(40)]})

        async def said() -> str:
            asked = read_request(str(file))
            findings = await follow_request(nats, redis, asked, None, DEFAULT_TENANT, 1.5, lambda _: None)
            lines = [one.line for one in findings if one.check == "request.worker"]
            return lines[0] if lines and "never stored" in lines[0] else ""

        assert "evicted" not in await until(said, what="its publisher is heard")


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("path", "prompt"),
    [
        ("/v1/completions", {"prompt": "Who holds this prefix? Grüße."}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Who holds this prefix?"}]}),
    ],
)
async def test_text_is_tokenized_by_an_engine_and_found_where_it_was_computed(
    installation: Installation, tmp_path: Path, path: str, prompt: dict[str, Any]
) -> None:
    request = {"model": MODEL, "max_tokens": 1, **prompt}
    file = tmp_path / "request.json"
    file.write_text(json.dumps(request))
    nats, redis = NatsAccess(installation.nats.url), RedisAccess(installation.valkey.url)
    async with installation.replicas("i"), installation.worker("w") as url, http_client(base_url=url) as client:
        answer = (await client.post(path, json=request)).json()
        tokens = answer["usage"]["prompt_tokens"]
        blocks, of = tokens // 4, -(-tokens // 4)

        async def found() -> list[Finding]:
            asked = read_request(str(file))
            findings = await follow_request(nats, redis, asked, None, DEFAULT_TENANT, 0.05, lambda _: None)
            return findings if f"w: {blocks} of {of} blocks" in " ".join(one.line for one in findings) else []

        findings = await until(found, what=f"the {blocks} blocks of the text are found")
    assert {one.level for one in findings} == {Level.OK}
    assert findings[0].line == f"prompt of {tokens} tokens, model {MODEL}, tokenizer {MODEL}, tenant {DEFAULT_TENANT}"
    assert findings[-1].line.startswith("w would be chosen: ")


@pytest.mark.parametrize(
    ("request_", "line"),
    [
        ({"model": "m", "messages": []}, "messages is []"),
        ({"prompt": [1, 2]}, "it names no model"),
        ([1, "two"], "token 1 is 'two'"),
        ({"model": "m"}, "names no model_id"),
    ],
)
def test_what_is_no_request_is_one_line(ask: Ask, request_: object, line: str) -> None:
    done = ask(request_)
    assert (done.code, done.out, done.err.count("\n")) == (1, "", 1) and line in done.err


def test_warnings_fail_too_if_asked_to(ask: Ask) -> None:
    unreachable = ("--nats-url", "nats://127.0.0.1:1")
    assert ask(TOKENS, "--model-id", "m", *unreachable).code == 0
    done = ask(TOKENS, "--model-id", "m", *unreachable, "--strict")
    assert done.code == 1 and "warning  nats.reachable" in done.out


def test_a_terminal_shows_what_is_being_done(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    done = ask(TOKENS, "--model-id", "m")
    assert [line.removesuffix(" ...") for line in done.err.split("\r\x1b[K")] == [
        "",
        "listening to heartbeats for 0.05 s",
        "looking the prompt up",
        "",
    ]
