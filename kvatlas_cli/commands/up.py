"""`kvatlas up`: NATS, Valkey and an indexer on loopback, publishers for running engines, and a router for them."""

import fcntl
import re
import tempfile
from collections.abc import Iterator, Set
from contextlib import AbstractAsyncContextManager, AsyncExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

import anyio
import typer
from anyio.abc import TaskStatus

from kvatlas.errors import SettingsError
from kvatlas.fleet.records import EngineKind
from kvatlas.fleet_store.fleet_store import FleetStore
from kvatlas.identity import rank_worker_id
from kvatlas.redaction import redact_url
from kvatlas.settings import (
    HttpSettings,
    IndexerSettings,
    NatsSettings,
    ProxySettings,
    PublishSettings,
    ServerSettings,
    UpSettings,
    flag_of,
    variable_of,
)
from kvatlas.store.connection import connected_store
from kvatlas_cli.commands.router import print_router_ready
from kvatlas_cli.discovered_sidecars import discover_sidecars
from kvatlas_cli.flags import JsonFlag, with_settings
from kvatlas_cli.output import print_json_line, print_notice
from kvatlas_cli.runner import run_service

if TYPE_CHECKING:
    from kvatlas.embedded import EmbeddedServer
    from kvatlas_indexer.indexer_process import Replica

LOCK_FILE = "up.lock"
LOOPBACK = "127.0.0.1"
ROUTABLE_S = 10.0
GRACE_S = 5.0
"""Time that answers in progress have to finish after Ctrl-C."""
DECISION_MS = 1_000.0
"""The decision deadline. As in the demo, all parts share this machine, so the store may have to wait for a core."""
_POLL_S = 0.05
NOT_IN_WORKER_ID = re.compile(r"[^A-Za-z0-9_-]+")

_FLAG_OF_KEY = {
    "engine": "engine",
    "endpoint": "endpoint",
    "replay": "replay_endpoint",
    "worker": "worker_id",
    "model": "model_id",
    "tokenizer": "tokenizer_id",
    "tenant": "tenant_id",
    "advertise": "advertise_url",
    "role": "role",
    "bootstrap": "bootstrap_port",
    "connector": "kv_connector",
    "kv_port": "kv_port",
}

EngineFlag = Annotated[
    list[str] | None,
    typer.Option(
        metavar="URL[,KEY=VALUE...]",
        help="HTTP address of a running engine; may be repeated. Its kind, model and event sockets are discovered; keys "
        "override them: engine (vllm, sglang, tensorrt_llm), endpoint (its event socket), replay, worker, model, "
        "tokenizer, tenant, advertise, role (prefill, decode), bootstrap (port of an SGLang prefill server), "
        "connector (p2p, kvcr, lmcache: how it fetches KV from others), kv_port (where others fetch).",
    ),
]


@with_settings(UpSettings)
def up(settings: UpSettings, engine: EngineFlag = None, as_json: JsonFlag = False) -> None:
    """Run NATS, Valkey, an indexer, publishers and, with --router, a router on this machine until stopped."""
    engines = [parse_engine(text) for text in engine or []]
    names = [flags["worker_id"] for flags in engines]
    for name in names:
        if names.count(name) > 1:
            raise SettingsError(f"--engine names worker {name} twice; set another name with worker=")
    metrics_page = settings.router or settings.status_port is not None
    run_service("up", settings, _up(settings, engines, as_json), metrics_page=metrics_page)


def parse_engine(text: str) -> dict[str, str]:
    """The publisher's flags for one `--engine`. Raises SettingsError."""
    url, *pairs = text.split(",")
    flags = {"engine_url": url.strip()}
    for pair in pairs:
        key, separator, value = pair.partition("=")
        if not separator or key.strip() not in _FLAG_OF_KEY:
            raise SettingsError(f"--engine has {pair!r}; expected KEY=VALUE, KEY one of {', '.join(_FLAG_OF_KEY)}")
        flags[_FLAG_OF_KEY[key.strip()]] = value.strip()
    try:
        parts = urlsplit(flags["engine_url"])
        host = parts.hostname if parts.scheme in ("http", "https") else None
    except ValueError:
        host = None
    if host is None:
        raise SettingsError(f"--engine is {text!r}; expected an address that begins with http:// or https://")
    flags.setdefault("worker_id", NOT_IN_WORKER_ID.sub("-", parts.netloc).strip("-")[:64])
    _check_values(flags)
    return flags


def _check_values(flags: dict[str, str]) -> None:
    """Check the values of the flags. Raises SettingsError, worded in terms of `--engine`, because the user did not write
    these flags."""
    to_be_discovered = {"engine": EngineKind.VLLM, "model_id": "m"}
    if flags.get("engine") != EngineKind.TENSORRT_LLM:
        to_be_discovered["endpoint"] = "tcp://127.0.0.1:1"
    try:
        PublishSettings.load(**{**to_be_discovered, **flags})
    except SettingsError as error:
        line = str(error)
        for key, field in _FLAG_OF_KEY.items():
            line = line.replace(f"{flag_of(field)} ", f"--engine's {key} ")
        raise SettingsError(line) from error


async def _up(settings: UpSettings, engines: list[dict[str, str]], as_json: bool) -> None:
    from kvatlas_indexer.service import run_indexer  # needs the extra

    async with AsyncExitStack() as stack:
        temporary = settings.state_dir is None
        if settings.state_dir is None:
            state_dir = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvatlas-")))
        else:
            state_dir = settings.state_dir
            state_dir.mkdir(parents=True, exist_ok=True)
            stack.enter_context(_locked(state_dir))
        for server, field, url in (("NATS", "nats_url", settings.nats_url), ("Redis", "redis_url", settings.redis_url)):
            if url is not None:
                spelled = f"{flag_of(field)} or {variable_of(field)}"
                print_notice(f"using the {server} at {redact_url(url)} ({spelled}); starting none here")
        nats_url = settings.nats_url or await _start_nats(stack, settings, state_dir)
        redis_url = settings.redis_url or await _start_valkey(stack, settings, state_dir, keep=not temporary)
        access = {
            name: getattr(settings, name) for name in ServerSettings.model_fields if not name.endswith("_url_file")
        }
        servers = {**access, "nats_url": nats_url, "redis_url": redis_url}
        nats = {name: servers[name] for name in NatsSettings.model_fields if name in servers}
        to_engines = {name: getattr(settings, name) for name in ("engine_key_file", "engine_ca_file")}
        publisher = {**nats, **to_engines}
        sidecars = [
            one
            for flags in engines
            for one in await discover_sidecars(flags, publisher, state_dir, settings.engine_access)
        ]
        page = {name: getattr(settings, name) for name in HttpSettings.model_fields}
        indexer_settings = IndexerSettings.load(
            **{**servers, **page}, status_port=settings.status_port, side_index=settings.side_index
        )
        ready = anyio.Event()

        def on_ready(indexer: "Replica") -> None:
            if indexer.status_url is not None and not as_json:
                print_notice(f"indexer's status page at {indexer.status_url}")
            ready.set()

        async with anyio.create_task_group() as group:
            group.start_soon(partial(run_indexer, indexer_settings, ready=on_ready))
            await ready.wait()
            if sidecars:
                from kvatlas_publishers.sidecar import run_sidecar  # needs the extra

                group.start_soon(run_sidecar, sidecars)
            router_url = None
            if settings.router:
                proxy_settings = ProxySettings.load(
                    **{**servers, **page, **to_engines},
                    host=LOOPBACK,
                    port=settings.router_port,
                    drain_s=0,
                    grace_s=GRACE_S,
                    decision_deadline_ms=DECISION_MS,
                )
                await _wait_until_routable(proxy_settings, {_worker_id(sidecar) for sidecar in sidecars})
                router_url = await group.start(_run_router, proxy_settings)
            where = None if temporary else state_dir
            _print_addresses(nats_url, redis_url, router_url, where, sidecars, as_json)


async def _run_router(settings: ProxySettings, *, task_status: TaskStatus[str]) -> None:
    """Run the router, and report its URL to `task_status` once it accepts requests."""
    from kvatlas_router.proxy_service import run_proxy  # needs the extra

    await run_proxy(settings, ready=task_status.started)


async def _wait_until_routable(settings: ProxySettings, workers: Set[str]) -> None:
    """Wait until the index knows the engines, so that the first request finds them. An engine that does not answer delays
    the others only for a limited time."""
    async with connected_store(settings.redis, wait=settings.wait) as store:
        fleet = FleetStore(store)
        waiting = workers
        with anyio.move_on_after(ROUTABLE_S):
            while waiting:
                records = await fleet.all()
                waiting = {name for name in workers if name not in records or not records[name].routable}
                await anyio.sleep(_POLL_S)
    if waiting:
        print_notice(f"not routable yet: worker {', '.join(sorted(waiting))}; `kvatlas workers` shows its state")


@contextmanager
def _locked(state_dir: Path) -> Iterator[None]:
    """Hold the folder's lock, which the kernel releases when the process ends. Raises SettingsError if another process
    holds it."""
    with (state_dir / LOCK_FILE).open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            line = f"--state-dir (or KVATLAS_STATE_DIR) is {state_dir}, which another `kvatlas up` uses"
            raise SettingsError(f"{line}; expected a separate folder") from None
        yield


async def _start_nats(stack: AsyncExitStack, settings: UpSettings, state_dir: Path) -> str:
    from kvatlas.embedded import nats_server  # needs the extra

    folder = state_dir / "nats"
    folder.mkdir(exist_ok=True)
    return await _start(stack, "nats", nats_server(port=settings.embedded_port("nats"), data_dir=folder))


async def _start_valkey(stack: AsyncExitStack, settings: UpSettings, state_dir: Path, *, keep: bool) -> str:
    from kvatlas.embedded import valkey_server  # needs the extra

    folder = state_dir / "valkey"
    folder.mkdir(exist_ok=True)
    server = valkey_server(port=settings.embedded_port("redis"), data_dir=folder, appendonly=keep)
    return await _start(stack, "redis", server)


async def _start(stack: AsyncExitStack, kind: str, server: AbstractAsyncContextManager["EmbeddedServer"]) -> str:
    """Start a server and return its URL. Raises SettingsError if its port is taken."""
    from kvatlas.embedded.server_process import PortTakenError

    try:
        return (await stack.enter_async_context(server)).url
    except PortTakenError as error:
        raise SettingsError(
            f"{error}; choose another port with --{kind}-port, or use a running server with --{kind}-url"
        ) from error


def _print_addresses(
    nats_url: str,
    redis_url: str,
    router_url: str | None,
    state_dir: Path | None,
    sidecars: list[PublishSettings],
    as_json: bool,
) -> None:
    if as_json:
        print_json_line(
            {
                "nats_url": redact_url(nats_url),
                "redis_url": redact_url(redis_url),
                **({} if router_url is None else {"router_url": router_url}),
                "state_dir": None if state_dir is None else str(state_dir),
                "workers": [_worker_id(sidecar) for sidecar in sidecars],
            }
        )
        return
    print_notice(f"up: state in {state_dir if state_dir is not None else 'a temporary folder'}; stop with Ctrl-C")
    for sidecar in sidecars:
        engine_url = redact_url(sidecar.engine_url or "")
        events = f"events from {sidecar.endpoint or 'there'}" if sidecar.events else "no events"
        print_notice(f"worker {_worker_id(sidecar)}: {engine_url}, model {sidecar.model_id}, {events}")
    if not sidecars:
        print_notice("no engine is named (--engine URL): start a publisher for each with `kvatlas publish`")
    print(
        f"export KVATLAS_NATS_URL={redact_url(nats_url)}\nexport KVATLAS_REDIS_URL={redact_url(redis_url)}", flush=True
    )
    if router_url is not None:
        print_router_ready(router_url)


def _worker_id(sidecar: PublishSettings) -> str:
    rank = sidecar.dp_rank
    return sidecar.worker_id if rank is None else rank_worker_id(sidecar.worker_id, rank)
