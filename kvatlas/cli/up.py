"""`kvatlas up`: NATS, Valkey and an indexer on this machine's loopback, and sidecars for engines that run already."""

import re
import tempfile
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

import anyio
import typer

from kvatlas.cli.flags import JsonFlag, with_settings
from kvatlas.cli.output import print_json_line
from kvatlas.cli.running import run_service, tell
from kvatlas.errors import SettingsError, Unreachable
from kvatlas.redact import without_password
from kvatlas.settings import IndexerSettings, PublishSettings, UpSettings

if TYPE_CHECKING:
    from indexer.replica import Replica

EVENTS_PORT = 5557
MODELS_DEADLINE_S = 5.0
FREE_WORKER_ID = re.compile(r"[^A-Za-z0-9_-]+")

_FLAG_OF_KEY = {
    "engine": "engine",
    "endpoint": "endpoint",
    "replay": "replay_endpoint",
    "worker": "worker_id",
    "model": "model_id",
    "tokenizer": "tokenizer_id",
    "tenant": "tenant_id",
    "advertise": "advertise_url",
}

EngineFlag = Annotated[
    list[str] | None,
    typer.Option(
        metavar="URL[,KEY=VALUE...]",
        help="An engine that runs already, by its HTTP address; may be repeated. Keys: engine (vllm, sglang), endpoint "
        "(its event socket; default: port 5557 of the same host), replay, worker, model (default: what it serves), "
        "tokenizer, tenant, advertise.",
    ),
]


@with_settings(UpSettings)
def up(settings: UpSettings, engine: EngineFlag = None, as_json: JsonFlag = False) -> None:
    """Start NATS, Valkey and an indexer on loopback, print how to reach them, and stay until stopped."""
    engines = [parse_engine(text) for text in engine or []]
    run_service("up", settings, _up(settings, engines, as_json))


def parse_engine(text: str) -> dict[str, str]:
    """The publisher's flags that one `--engine` stands for. Raises SettingsError."""
    url, *pairs = text.split(",")
    flags = {"engine_url": url.strip()}
    for pair in pairs:
        key, separator, value = pair.partition("=")
        if not separator or key.strip() not in _FLAG_OF_KEY:
            raise SettingsError(f"--engine has {pair!r}; expected KEY=VALUE with a key of {', '.join(_FLAG_OF_KEY)}")
        flags[_FLAG_OF_KEY[key.strip()]] = value.strip()
    try:
        parts = urlsplit(flags["engine_url"])
        host = parts.hostname if parts.scheme in ("http", "https") else None
    except ValueError:
        host = None
    if host is None:
        raise SettingsError(f"--engine is {text!r}; expected an address that begins with http:// or https://")
    flags.setdefault("engine", "vllm")
    flags.setdefault("endpoint", f"tcp://{f'[{host}]' if ':' in host else host}:{EVENTS_PORT}")
    flags.setdefault("worker_id", FREE_WORKER_ID.sub("-", parts.netloc).strip("-")[:64])
    return flags


async def _up(settings: UpSettings, engines: list[dict[str, str]], as_json: bool) -> None:
    from indexer.service import run_indexer  # needs the extra

    async with AsyncExitStack() as stack:
        temporary = settings.state_dir is None
        if settings.state_dir is None:
            state_dir = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvatlas-")))
        else:
            state_dir = settings.state_dir
            state_dir.mkdir(parents=True, exist_ok=True)
        nats_url = settings.nats_url or await _embedded_nats(stack, settings, state_dir)
        redis_url = settings.redis_url or await _embedded_valkey(stack, settings, state_dir, keep=not temporary)
        servers = {"nats_url": nats_url, "redis_url": redis_url, "wait": settings.wait}
        sidecars = [await _sidecar_settings(flags, servers, state_dir) for flags in engines]
        indexer_settings = IndexerSettings.load(**servers, status_port=settings.status_port)
        ready = anyio.Event()

        def on_ready(_: "Replica") -> None:
            ready.set()

        async with anyio.create_task_group() as group:
            group.start_soon(partial(run_indexer, indexer_settings, ready=on_ready))
            await ready.wait()
            if sidecars:
                from publishers.sidecar import run_sidecar  # needs the extra

                group.start_soon(run_sidecar, sidecars)
            _announce(nats_url, redis_url, None if temporary else state_dir, sidecars, as_json)


async def _embedded_nats(stack: AsyncExitStack, settings: UpSettings, state_dir: Path) -> str:
    from kvatlas.embedded import nats_server  # needs the extra

    folder = state_dir / "nats"
    folder.mkdir(exist_ok=True)
    return (await stack.enter_async_context(nats_server(port=settings.nats_port, data_dir=folder))).url


async def _embedded_valkey(stack: AsyncExitStack, settings: UpSettings, state_dir: Path, *, keep: bool) -> str:
    from kvatlas.embedded import valkey_server  # needs the extra

    folder = state_dir / "valkey"
    folder.mkdir(exist_ok=True)
    server = valkey_server(port=settings.redis_port, data_dir=folder, appendonly=keep)
    return (await stack.enter_async_context(server)).url


async def _sidecar_settings(flags: dict[str, str], servers: dict[str, object], state_dir: Path) -> PublishSettings:
    folder = state_dir / "publishers" / flags["worker_id"]
    folder.mkdir(parents=True, exist_ok=True)
    model_id = flags.get("model_id") or await _served_model(flags["engine_url"])
    return PublishSettings.load(**{**servers, **flags, "model_id": model_id, "state_dir": folder})


async def _served_model(engine_url: str) -> str:
    """The first model that an engine's `/v1/models` lists. Raises Unreachable."""
    import httpx  # needs the extra

    url = f"{engine_url.rstrip('/')}/v1/models"
    try:
        async with httpx.AsyncClient(timeout=MODELS_DEADLINE_S) as client:
            answer = (await client.get(url)).raise_for_status().json()
        return str(answer["data"][0]["id"])
    except httpx.HTTPError as error:
        raise Unreachable(f"engine at {url}: {error or type(error).__name__}; or give it with model=") from error
    except (ValueError, LookupError, TypeError) as error:
        raise Unreachable(f"engine at {url} does not list a model; give it with model=") from error


def _announce(
    nats_url: str, redis_url: str, state_dir: Path | None, sidecars: list[PublishSettings], as_json: bool
) -> None:
    if as_json:
        print_json_line(
            {
                "nats_url": nats_url,
                "redis_url": redis_url,
                "state_dir": None if state_dir is None else str(state_dir),
                "workers": [sidecar.worker_id for sidecar in sidecars],
            }
        )
        return
    tell(f"up: state in {state_dir if state_dir is not None else 'a temporary folder'}; stop with Ctrl-C")
    for sidecar in sidecars:
        engine_url = without_password(sidecar.engine_url or "")
        tell(f"worker {sidecar.worker_id}: {engine_url}, model {sidecar.model_id}, events from {sidecar.endpoint}")
    print(f"export KVATLAS_NATS_URL={nats_url}\nexport KVATLAS_REDIS_URL={redis_url}", flush=True)
