"""Every mistake is reported in one line on stderr, without traceback, and with exit code 1, or 2 for usage."""

import json
import re
import socket
from pathlib import Path

import pytest
from redis import Redis

from kvatlas.embedded import ServerProcess
from kvatlas.embedded.valkey import ValkeyProcess
from kvatlas.index.redis.keys import LAYOUT, LAYOUT_VERSION, SWITCHED_VERSION
from kvatlas.settings import UpSettings
from tests.kvatlas_cli.conftest import UNUSED_ADDRESS, Cli, start_command

ROUTE = ("route", "--model-id", "m", "--tokens", "-")
PUBLISH = ("publish", "--engine", "vllm", "--endpoint", "tcp://127.0.0.1:5557", "--worker-id", "w", "--model-id", "m")


@pytest.mark.parametrize(
    ("words", "code", "line"),
    [
        (("nosuch",), 2, "kvatlas: No such command 'nosuch'. (see kvatlas --help)"),
        (("--nosuch",), 2, "kvatlas: No such option: --nosuch (see kvatlas --help)"),
        (("workers", "--nosuch"), 2, "kvatlas workers: No such option: --nosuch (see kvatlas workers --help)"),
        (
            ("route", "--model-id", "m"),
            2,
            "kvatlas route: neither of --tokens and --hints given; expected one of them",
        ),
        (
            ("overlap", "--tokens", "-"),
            2,
            "kvatlas overlap: --model-id (or KVATLAS_MODEL_ID) is missing; expected the model that the request is for",
        ),
        (
            ("workers", "--redis-url", "http://127.0.0.1"),
            2,
            "kvatlas workers: --redis-url is 'http://127.0.0.1'; expected a URL that begins with redis:// or rediss:// "
            "or unix:// or redis+cluster:// or rediss+cluster:// or redis+sentinel:// or rediss+sentinel://",
        ),
        (
            ("indexer", "--nats-url", "127.0.0.1:4222"),
            2,
            "kvatlas indexer: --nats-url is '127.0.0.1:4222'; expected a URL that begins with nats:// or tls:// or "
            "ws:// or wss://",
        ),
        (
            ("indexer", "--partitions", "0"),
            2,
            "kvatlas indexer: --partitions is '0'; expected at least 1",
        ),
        (
            ("indexer", "--status-port", "many"),
            2,
            "kvatlas indexer: --status-port is 'many'; expected an integer",
        ),
        (
            ("indexer", "--partitions", "1000000000"),
            2,
            "kvatlas indexer: --partitions is '1000000000'; expected at most 4096",
        ),
        (
            ("indexer", "--shards", "7", "--partitions", "64"),
            2,
            "kvatlas indexer: --shards is 7; expected a divisor of 64 partitions",
        ),
        (
            ("workers", "--redis-url", "redis://127.0.0.1:6379/first"),
            2,
            "kvatlas workers: --redis-url is 'redis://127.0.0.1:6379/***'; expected nothing or a database number "
            "after the port",
        ),
        (
            (*ROUTE, "--output-tokens", "99999999999999999999999"),
            2,
            "kvatlas route: --output-tokens is '99999999999999999999999'; expected at most 2147483647",
        ),
        (
            (*PUBLISH, "--block-bytes", "99999999999999999999999"),
            2,
            "kvatlas publish: --block-bytes is '99999999999999999999999'; expected at most 4294967295",
        ),
        (
            ("simulate-engine", "--num-gpu-blocks", "99999999999999"),
            2,
            "kvatlas simulate-engine: --num-gpu-blocks is '99999999999999'; expected at most 4194304",
        ),
        (
            ("overlap", "--model-id", "", "--tokens", "-"),
            2,
            "kvatlas overlap: --model-id is ''; expected non-empty text",
        ),
        (("simulate-engine", "--topic", "\udcff"), 2, "kvatlas: argument '\\udcff' is not UTF-8"),
        (
            ("audit", "--deadline", "-1"),
            2,
            "kvatlas audit: Invalid value for '--deadline': Input should be greater than or equal to 0 "
            "(see kvatlas audit --help)",
        ),
        (
            (*PUBLISH[:3], *PUBLISH[5:]),
            2,
            "kvatlas publish: --endpoint (or KVATLAS_ENDPOINT) is missing; expected the engine's event socket, or --no-events",
        ),
        (
            (*PUBLISH, "--no-events"),
            2,
            "kvatlas publish: --engine-url (or KVATLAS_ENGINE_URL) is missing; expected the engine's HTTP address, the only "
            "source with --no-events",
        ),
        (
            (*PUBLISH, "--worker-id", "a/b"),
            2,
            "kvatlas publish: --worker-id is 'a/b'; expected 1 to 64 characters from A-Z a-z 0-9 _ - . (a dot becomes _)",
        ),
        (
            ("publish", "--engine", "open", "--worker-id", "w", "--model-id", "m"),
            2,
            "kvatlas publish: --endpoint (or KVATLAS_ENDPOINT) is missing; expected the engine's event socket, or "
            "--status-port for POST /events",
        ),
        (
            (*PUBLISH, "--engine", "lmcache"),
            2,
            "kvatlas publish: --engine is 'lmcache'; expected 'vllm', 'sglang', 'tensorrt_llm', 'open' or 'mock', the kinds "
            "whose events can be read, or 'store'",
        ),
        (
            (*PUBLISH, "--engine", "store", "--block-size", "16", "--store-ttl-s", "60"),
            2,
            "kvatlas publish: --endpoint is tcp://127.0.0.1:5557; remove it: a shared store is not an engine",
        ),
        (
            ("publish", "--engine", "store", "--worker-id", "s", "--model-id", "m"),
            2,
            "kvatlas publish: --block-size (or KVATLAS_BLOCK_SIZE) is missing; expected the block size of the engines that "
            "use the store",
        ),
        (
            ("publish", "--engine", "store", "--worker-id", "s", "--model-id", "m", "--block-size", "16"),
            2,
            "kvatlas publish: --store-ttl-s (or KVATLAS_STORE_TTL_S) is missing; expected a time after which a block counts "
            "as evicted, since evictions are not reported; or --lmcache-endpoint",
        ),
        (
            (*PUBLISH, "--read-us-per-mib", "5"),
            2,
            "kvatlas publish: --read-us-per-mib is 5; remove it: it is only for --engine store",
        ),
        (
            (*PUBLISH, "--engine", "tensorrt_llm", "--engine-url", "http://127.0.0.1:1"),
            2,
            "kvatlas publish: --endpoint is tcp://127.0.0.1:5557; remove it: TensorRT-LLM's events are read at "
            "--engine-url",
        ),
        (
            (*PUBLISH, "--engine", "tensorrt_llm"),
            2,
            "kvatlas publish: --engine-url (or KVATLAS_ENGINE_URL) is missing; expected trtllm-serve's HTTP address, where "
            "events are read",
        ),
        (
            (*PUBLISH, "--endpoint", "http://x"),
            2,
            "kvatlas publish: --endpoint is 'http://x'; expected a URL that begins with tcp:// or ipc:// or inproc://",
        ),
        (
            ("up", "--engine", "nonsense"),
            2,
            "kvatlas up: --engine is 'nonsense'; expected an address that begins with http:// or https://",
        ),
        (
            ("up", "--engine", "http://127.0.0.1:1", "--engine", "http://127.0.0.1:1,model=m"),
            2,
            "kvatlas up: --engine names worker 127-0-0-1-1 twice; set another name with worker=",
        ),
        (
            ("up", "--engine", "http://127.0.0.1:1,color=red"),
            2,
            "kvatlas up: --engine has 'color=red'; expected KEY=VALUE, KEY one of engine, endpoint, replay, worker, "
            "model, tokenizer, tenant, advertise, role, bootstrap, connector, kv_port",
        ),
        (
            ("up", "--engine", "http://127.0.0.1:1,engine=lmcache"),
            2,
            "kvatlas up: --engine's engine is 'lmcache'; expected 'vllm', 'sglang', 'tensorrt_llm', 'open' or 'mock', the "
            "kinds whose events can be read, or 'store'",
        ),
        (
            ("up", "--engine", "http://127.0.0.1:1,worker=a/b"),
            2,
            "kvatlas up: --engine's worker is 'a/b'; expected 1 to 64 characters from A-Z a-z 0-9 _ - . (a dot becomes _)",
        ),
        (
            ("up", "--router-port", "8081"),
            2,
            "kvatlas up: --router-port (or KVATLAS_ROUTER_PORT) is 8081, but no router is started; add --router",
        ),
    ],
)
def test_a_wrong_command_line_is_reported_in_one_line(cli: Cli, words: tuple[str, ...], code: int, line: str) -> None:
    done = cli(*words)
    assert (done.code, done.out, done.err) == (code, "", line + "\n")


def test_a_wrong_variable_is_named_and_a_flag_overrides_it(cli: Cli) -> None:
    done = cli("workers", KVATLAS_REDIS_URL="x")
    assert done.code == 2 and done.err.startswith("kvatlas workers: KVATLAS_REDIS_URL is '***'; expected")
    done = cli("workers", "--no-wait", "--redis-url", f"redis://{UNUSED_ADDRESS}", KVATLAS_REDIS_URL="x")
    assert done.code == 1 and "KVATLAS_REDIS_URL" not in done.err


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", "no token ids; expected integers separated by white space or commas, or a JSON array"),
        ("1 2 x", "token 2 is 'x'; expected an integer from 0 to 4294967295"),
        ("1 -2", "token 1 is '-2'; expected an integer from 0 to 4294967295"),
        ("4294967296", "token 0 is '4294967296'; expected an integer from 0 to 4294967295"),
        ("[1, 2.5]", "token 1 is 2.5; expected an integer from 0 to 4294967295"),
        ("[1, true]", "token 1 is True; expected an integer from 0 to 4294967295"),
        ("[1, 2", "not a JSON array: Expecting ',' delimiter: line 1 column 6 (char 5)"),
    ],
)
def test_wrong_tokens_are_reported_in_one_line(cli: Cli, text: str, line: str) -> None:
    done = cli(*ROUTE, stdin=text)
    assert (done.code, done.out, done.err) == (1, "", f"kvatlas: --tokens stdin: {line}\n")


def test_deeply_nested_tokens_are_reported_in_one_line(cli: Cli) -> None:
    done = cli(*ROUTE, stdin="[" * 100_000)
    assert (done.code, done.err.count("\n")) == (1, 1)
    assert done.err.startswith("kvatlas: --tokens stdin: not a JSON array: maximum recursion depth exceeded")


def test_a_token_file_that_is_missing_or_not_text_is_named(cli: Cli, tmp_path: Path) -> None:
    done = cli("route", "--model-id", "m", "--tokens", "/nosuch/file")
    assert (done.code, done.err) == (1, "kvatlas: --tokens /nosuch/file: No such file or directory\n")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    done = cli("route", "--model-id", "m", "--tokens", "binary")
    assert (done.code, done.err) == (1, "kvatlas: --tokens binary: not text (invalid start byte at byte 0)\n")


OVERLAP = ("overlap", *ROUTE[1:])


@pytest.mark.parametrize(
    "words", [("export",), ("workers",), ("rates",), ("audit",), ROUTE, OVERLAP, ("indexer", "--no-wait")]
)
def test_an_unreachable_store_is_named(cli: Cli, words: tuple[str, ...]) -> None:
    """Queries report it at once, a service only if it is set not to wait."""
    done = cli(*words, "--redis-url", f"redis://:secret@{UNUSED_ADDRESS}", stdin="1 2 3")
    assert done.code == 1 and done.out == ""
    assert re.fullmatch(r"kvatlas: Redis at redis://\*\*\*@127\.0\.0\.1:1: .*refused.*\n", done.err)


@pytest.mark.parametrize("words", [("indexer", "--no-wait"), ("audit",)])
def test_an_unreachable_nats_is_named(cli: Cli, fleet_store_url: str, words: tuple[str, ...]) -> None:
    done = cli(*words, "--redis-url", fleet_store_url, "--nats-url", f"nats://{UNUSED_ADDRESS}")
    assert done.code == 1 and done.out == ""
    assert re.fullmatch(r"kvatlas: NATS at nats://127\.0\.0\.1:1: .+\n", done.err)


def test_up_reports_which_server_it_does_not_start(cli: Cli) -> None:
    """Otherwise a second `up` in a shell with the exported addresses would wait for the first one's servers unexplained."""
    done = cli("up", "--no-wait", KVATLAS_REDIS_URL=f"redis://{UNUSED_ADDRESS}")
    notice, failed = done.err.splitlines()
    server = f"the Redis at redis://{UNUSED_ADDRESS} (--redis-url or KVATLAS_REDIS_URL)"
    assert notice == f"kvatlas: using {server}; starting none here"
    assert done.code == 1 and failed.startswith(f"kvatlas: Redis at redis://{UNUSED_ADDRESS}: ")


@pytest.mark.parametrize(("url", "port"), [("nats", "nats"), ("redis", "redis")])
def test_up_refuses_a_port_for_a_server_that_it_joins(cli: Cli, url: str, port: str) -> None:
    joined = f"{url}://:secret@{UNUSED_ADDRESS}"
    done = cli("up", "--no-wait", f"--{port}-port", "4222", **{f"KVATLAS_{url.upper()}_URL": joined})
    one = f"--{port}-port (or KVATLAS_{port.upper()}_PORT) is 4222"
    other = f"--{url}-url (or KVATLAS_{url.upper()}_URL) is {url}://***@{UNUSED_ADDRESS}"
    line = f"{one}, but {other}: that server is used and none is started; expected only one of the two"
    assert (done.code, done.out, done.err) == (2, "", f"kvatlas up: {line}\n")


@pytest.mark.parametrize(("kind", "server"), [("nats", "nats-server"), ("redis", "valkey-server")])
def test_up_names_the_flags_for_a_port_that_is_taken(cli: Cli, kind: str, server: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        done = cli("up", f"--{kind}-port", str(port))
    taken = f"{server} can't listen on 127.0.0.1:{port}: address already in use"
    line = f"{taken}; choose another port with --{kind}-port, or use a running server with --{kind}-url"
    assert (done.code, done.out, done.err) == (2, "", f"kvatlas up: {line}\n")


def test_with_a_router_up_puts_its_servers_where_other_commands_look(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("KVATLAS_NATS_URL", "KVATLAS_REDIS_URL", "KVATLAS_NATS_PORT", "KVATLAS_REDIS_PORT"):
        monkeypatch.delenv(name, raising=False)
    chosen = {
        (flag, given): (settings.embedded_port("nats"), settings.embedded_port("redis"))
        for flag in (False, True)
        for given in (None, 0, 7000)
        for settings in [UpSettings.load(router=flag, nats_port=given, redis_port=given)]
    }
    assert chosen == {
        (False, None): (0, 0),
        (False, 0): (0, 0),
        (False, 7000): (7000, 7000),
        (True, None): (4222, 6379),
        (True, 0): (0, 0),
        (True, 7000): (7000, 7000),
    }


def test_a_folder_that_a_publisher_can_not_write_is_refused_at_the_start(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = cli(*PUBLISH, "--no-wait", "--nats-url", f"nats://{UNUSED_ADDRESS}", "--state-dir", str(tmp_path / "file"))
    line = f"--state-dir (or KVATLAS_STATE_DIR): can't write to {tmp_path}/file: File exists"
    assert (done.code, done.err) == (2, f"kvatlas publish: {line}; expected a folder for the saved ledger\n")


def test_a_publisher_names_an_unreachable_nats(cli: Cli) -> None:
    done = cli(*PUBLISH, "--no-wait", "--nats-url", f"nats://{UNUSED_ADDRESS}")
    assert (done.code, done.out) == (1, "")
    assert re.fullmatch(r"kvatlas: NATS at nats://127\.0\.0\.1:1: .+\n", done.err)


def test_a_standalone_server_is_refused_as_a_cluster(cli: Cli, valkey_server: ServerProcess) -> None:
    done = cli("workers", "--no-wait", "--redis-url", f"redis+cluster://127.0.0.1:{valkey_server.port}")
    assert (done.code, done.out) == (1, "")
    assert re.fullmatch(r"kvatlas: Redis at redis\+cluster://.*: .*Cluster mode is not enabled.*\n", done.err)


def test_a_model_without_workers_is_reported(cli: Cli, fleet_store_url: str) -> None:
    done = cli(
        "overlap", "--model-id", "nobody", "--tokens", "-", "--json", "--redis-url", fleet_store_url, stdin="1 2 3"
    )
    assert done.code == 1 and json.loads(done.out)["workers"] == []
    assert done.err == "kvatlas: no worker serves model 'nobody' with tokenizer 'nobody'; see kvatlas workers\n"


@pytest.mark.parametrize("command", ["audit", "export"])
def test_a_question_about_an_unknown_worker_fails(
    cli: Cli, fleet_store_url: str, nats_server: ServerProcess, command: str
) -> None:
    done = cli(command, "--worker", "nobody", KVATLAS_REDIS_URL=fleet_store_url, KVATLAS_NATS_URL=nats_server.url)
    line = "kvatlas: no worker 'nobody': neither the index nor the fleet has it\n"
    assert (done.code, done.out, done.err) == (1, "", line)


def test_a_foreign_value_in_the_store_is_reported_in_one_line(cli: Cli) -> None:
    with ValkeyProcess() as server:
        with Redis.from_url(server.url) as client:
            client.set(LAYOUT, "text")
        done = cli("export", "--redis-url", server.url)
        assert (done.code, done.out) == (1, "")
        assert re.fullmatch(r"kvatlas: Redis: WRONGTYPE .+\n", done.err)


def test_an_empty_store_is_reported_with_what_to_do(cli: Cli, valkey_server: ServerProcess) -> None:
    with ValkeyProcess() as empty:
        done = cli("export", "--redis-url", empty.url)
        assert done.code == 1
        assert done.err == f"kvatlas: Redis at {empty.url}: no index there yet; start an indexer first\n"


@pytest.mark.parametrize("words", [("export",), ("workers",), ROUTE, ("indexer",)])
def test_another_layout_version_is_refused(cli: Cli, words: tuple[str, ...]) -> None:
    with ValkeyProcess() as server:
        with Redis.from_url(server.url) as client:
            client.hset(LAYOUT, mapping={"version": SWITCHED_VERSION + 1, "partitions": 64, "shards": 1})
        done = cli(*words, "--redis-url", server.url, stdin="1 2 3")
        line = f"layout version {SWITCHED_VERSION + 1}; this kvatlas expects {LAYOUT_VERSION} or {SWITCHED_VERSION}"
        assert (done.code, done.err) == (1, f"kvatlas: Redis at {server.url}: {line}\n")


def test_a_malformed_layout_is_refused(cli: Cli) -> None:
    with ValkeyProcess() as server:
        with Redis.from_url(server.url) as client:
            client.hset(LAYOUT, mapping={"version": LAYOUT_VERSION, "partitions": "many", "shards": 1})
        done = cli("export", "--redis-url", server.url)
        assert done.code == 1 and done.err.count("\n") == 1
        assert done.err.startswith(
            f"kvatlas: Redis at {server.url}: layout of 'many' partitions and '1' shards; expected"
        )


def test_missing_and_wrong_credentials_are_reported(cli: Cli) -> None:
    with ValkeyProcess(password="secret") as server:
        address = f"redis://127.0.0.1:{server.port}"
        done = cli("workers", "--redis-url", address)
        assert (done.code, done.out) == (1, "")
        assert done.err == f"kvatlas: Redis at {address}: it requires credentials; put them into the URL\n"
        done = cli("workers", "--redis-url", f"redis://:wrong@127.0.0.1:{server.port}")
        assert (done.code, done.err.count("\n")) == (1, 1) and "wrong" not in done.err


def test_an_evicting_store_is_refused(cli: Cli) -> None:
    with ValkeyProcess(settings={"maxmemory-policy": "allkeys-lru"}) as server:
        done = cli("indexer", "--redis-url", server.url)
        assert done.code == 1
        assert "allkeys-lru" in done.err and "noeviction" in done.err and done.err.count("\n") == 1


def test_a_taken_status_port_is_named(cli: Cli, valkey_server: ServerProcess) -> None:
    done = cli("indexer", "--redis-url", valkey_server.url, "--status-port", str(valkey_server.port))
    assert done.code == 2
    assert (
        done.err
        == f"kvatlas indexer: status page can't listen on 127.0.0.1:{valkey_server.port}: Address already in use\n"
    )


def test_a_wrong_telemetry_variable_is_reported_in_one_line(cli: Cli) -> None:
    done = cli("workers", OTEL_TRACES_EXPORTER="nosuch")
    assert done.code == 2 and done.err.count("\n") == 1
    assert done.err.startswith("kvatlas workers: OTEL_TRACES_EXPORTER asks for the traces exporter 'nosuch'")


def test_closed_stdout_causes_no_traceback(fleet_store_url: str) -> None:
    process = start_command("export", "--redis-url", fleet_store_url)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    with process.stderr as errors:
        assert (errors.read(), process.wait(timeout=30)) == ("", 1)
