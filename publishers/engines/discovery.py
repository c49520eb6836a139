"""Asks a running engine over HTTP for its kind, its model, its block size, and the addresses of its KV events.

    vLLM     /v1/models, /kv_event_sources (later versions), /metrics (`vllm:cache_config_info`), /server_info (development
             servers only)
    SGLang   /v1/models, /server_info (earlier: /get_server_info): `page_size`, `kv_events_config`, `dp_size`,
             `disaggregation_mode`, `disaggregation_bootstrap_port`

If an engine does not list its event sockets, the usual ports are tried: events on 5557, replay on 5558.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

import anyio
import httpx
from prometheus_client.parser import text_string_to_metric_families

from kvatlas.engine_access import KEY_CURE, NO_KEY, REFUSED, EngineAccess
from kvatlas.errors import Unreachable
from kvatlas.fleet.records import EngineKind, Role
from kvatlas_publishers.engines.http_client import engine_http
from kvatlas_publishers.engines.kv_connectors import FoundConnector, sglang_connector, vllm_connector
from kvatlas_publishers.engines.sglang import is_too_old

EVENTS_PORT = 5557
REPLAY_PORT = 5558
ANSWER_S = 5.0
CONNECT_S = 1.0

_INFO = "vllm:cache_config_info"
_WILDCARDS = ("*", "0.0.0.0", "::", "[::]")  # noqa: S104 - engines report these as their own address
_EAGLE = ("EAGLE", "EAGLE3", "NEXTN", "FROZEN_KV_MTP")
"""SGLang's speculative algorithms that key its tree by pairs (`SpeculativeAlgorithm.is_eagle`, 0.5.6 to 0.5.23)."""


@dataclass(frozen=True, slots=True)
class EventSource:
    """The event feed of one rank; `rank=None`: the engine has only one. The endpoints are ready to connect to."""

    endpoint: str
    replay_endpoint: str | None = None
    topic: str = ""
    rank: int | None = None


@dataclass(frozen=True, slots=True)
class EngineOffer:
    """What one engine offers. `block_size=None`: unknown. `notes`: what the user should know, one line each.

    `sources` empty: the engine publishes no events. `ranks`: its data-parallel ranks, (None,) if there is only one. `assumed`:
    the engine does not list its sources, so these are the usual ones. `connector`: how it fetches KV from other engines, if
    known.
    """

    kind: EngineKind
    model_id: str
    sources: Sequence[EventSource]
    block_size: int | None = None
    eagle: bool = False
    notes: Sequence[str] = ()
    ranks: Sequence[int | None] = (None,)
    assumed: bool = False
    role: Role = Role.BOTH
    bootstrap_port: int | None = None
    connector: FoundConnector | None = None


async def discover(
    url: str,
    *,
    model_id: str | None = None,
    kind: EngineKind | None = None,
    events: bool = True,
    access: EngineAccess = NO_KEY,
    worker_id: str = "",
) -> EngineOffer:
    """Ask an engine what it offers. `model_id`, `kind`: if already known; `events=False`: don't look for event sockets;
    `worker_id`: the engine's name in `access`.

    Raises Unreachable, with a one-line message, if the engine does not answer, lists no model, or is a server of
    kvatlas.
    """
    host = urlsplit(url).hostname or ""
    async with engine_http(url, worker_id, access, ANSWER_S) as client:
        cards = await _list_models(client, url) if model_id is None or kind is None else ()
        if kind is None:
            kind = EngineKind.SGLANG if any(card.get("owned_by") == "sglang" for card in cards) else EngineKind.VLLM
        listed_models = [str(card["id"]) for card in cards if not card.get("parent")]
        notes = _unlisted_note(model_id, listed_models) if model_id is not None else ()
        model_id = model_id or listed_models[0]
        if kind is EngineKind.TENSORRT_LLM:
            return EngineOffer(kind, model_id, (), notes=notes)  # its events are read at its HTTP address
        if kind is EngineKind.SGLANG:
            info = await _get_sglang_info(client)
            offer = replace(sglang_offer(info, model_id, host), connector=sglang_connector(info))
        else:
            listed = await _get_json(client, "/kv_event_sources")
            page = await client.get("/metrics")
            offer = vllm_offer(listed, page.text if page.status_code == 200 else "", model_id, host)
            shown = await _get_json(client, "/server_info?config_format=json")
            offer = replace(offer, kind=kind, connector=vllm_connector(shown))
    offer = replace(offer, notes=[*notes, *offer.notes])
    if not events:
        return replace(offer, sources=())
    offer = await _check_sockets(offer)
    if not offer.sources:
        remedy = _REMEDIES.get(offer.kind, "give its endpoint=")
        note = f"it publishes no KV events, so its cache is only predicted from the requests sent there; {remedy}"
        return replace(offer, notes=[*offer.notes, note])
    return offer


async def listed_source(url: str, rank: int | None, kind: EngineKind) -> EventSource | None:
    """The current event sockets of a rank (None: the engine's only one) as listed by the engine; None if it does not list
    them."""
    host = urlsplit(url).hostname or ""
    async with httpx.AsyncClient(base_url=url.rstrip("/"), timeout=ANSWER_S, trust_env=False) as client:
        try:
            if kind is EngineKind.SGLANG:
                info = await _get_sglang_info(client)
                sources = list(_listed_sources(info.get("kv_event_sources"), host).values())
            else:
                offer = vllm_offer(await _get_json(client, "/kv_event_sources"), "", "", host)
                sources = [] if offer.assumed else list(offer.sources)
        except Unreachable:
            return None
    return next((one for one in sources if (one.rank or 0) == (rank or 0)), None)


MAX_RANKS = 1_024
_LIST_PORTS = "give it a fixed port, or start SGLang 0.5.22 or later with --grpc-port too"
_ROLES = {"prefill": Role.PREFILL, "decode": Role.DECODE}
_REMEDIES = {
    EngineKind.SGLANG: 'to be exact, start it with --kv-events-config \'{"publisher": "zmq", "endpoint": "tcp://*:5557"}\'',
    EngineKind.VLLM: 'to be exact, start it with --kv-events-config \'{"enable_kv_cache_events": true, "publisher": "zmq", '
    '"endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5558"}\'',
}


def _unlisted_note(model_id: str, listed: Sequence[str]) -> Sequence[str]:
    """A note for the user if the engine does not list the given model."""
    if not listed or model_id in listed:
        return ()
    return (f"it lists {', '.join(listed)}, not {model_id}: requests that name {model_id} may fail there",)


def vllm_offer(listed: Any, metrics_page: str, model_id: str, host: str) -> EngineOffer:
    """What a vLLM engine offers, from its HTTP answers. `listed`: the answer from `/kv_event_sources`; None for versions that
    do not list their event sources."""
    ranks, block_size, caching = _cache_config(metrics_page)
    is_listed = isinstance(listed, Mapping | list)
    sources: list[EventSource] = []
    if is_listed:
        found = _listed_sources(listed, host)
        sources = [replace(found[rank], rank=rank if len(listed) > 1 else None) for rank in sorted(found)]
    else:
        for rank in range(max(1, ranks)):
            endpoints = [resolve_endpoint(f"tcp://*:{port + rank}", host) for port in (EVENTS_PORT, REPLAY_PORT)]
            sources.append(EventSource(endpoints[0], endpoints[1], "", rank if ranks > 1 else None))
    notes = () if caching else (f"model {model_id}: prefix caching is off, so its cache is always empty",)
    return EngineOffer(
        EngineKind.VLLM,
        model_id,
        sources,
        block_size,
        notes=notes,
        ranks=range(ranks) if ranks > 1 else (None,),
        assumed=not is_listed,
    )


def sglang_offer(info: Mapping[str, Any], model_id: str, host: str) -> EngineOffer:
    """What an SGLang engine offers, from its server info: its command-line arguments and, since 0.5.22 with `--grpc-port`, the
    sockets of this node's ranks."""
    try:
        config = json.loads(info.get("kv_events_config") or "{}")
    except (ValueError, TypeError, RecursionError):
        config = {}
    size = info.get("page_size")
    sources: list[EventSource] = []
    notes: list[str] = []
    dp_size = info.get("dp_size")
    ranks = range(min(dp_size, MAX_RANKS)) if isinstance(dp_size, int) and dp_size > 1 else (None,)
    if isinstance(config, Mapping) and config.get("publisher") == "zmq":
        endpoint, replay = str(config.get("endpoint") or f"tcp://*:{EVENTS_PORT}"), config.get("replay_endpoint")
        listed = _listed_sources(info.get("kv_event_sources"), host)
        for rank in ranks:
            if (known := listed.get(rank or 0)) is not None:
                sources.append(replace(known, rank=rank))
                continue
            if endpoint.endswith(":0"):
                notes.append(f"it doesn't list the port of its events (rank {rank or 0}); {_LIST_PORTS}")
                continue
            sources.append(
                EventSource(
                    shift_port(resolve_endpoint(endpoint, host), rank or 0),
                    shift_port(resolve_endpoint(str(replay), host), rank or 0) if replay else None,
                    str(config.get("topic") or ""),
                    rank,
                )
            )
    eagle = str(info.get("speculative_algorithm") or "").upper() in _EAGLE
    if info.get("disable_radix_cache"):
        notes.append(f"model {model_id}: the radix cache is off, so its cache is always empty")
    if is_too_old(version := str(info.get("version"))):
        notes.append(f"it is SGLang {version}, whose events don't say what it holds; upgrade to 0.5.7 or later")
    role = _ROLES.get(str(info.get("disaggregation_mode")), Role.BOTH)
    port = info.get("disaggregation_bootstrap_port")
    return EngineOffer(
        EngineKind.SGLANG,
        model_id,
        sources,
        size if isinstance(size, int) else None,
        eagle,
        notes,
        ranks,
        role=role,
        bootstrap_port=port if role is Role.PREFILL and isinstance(port, int) and 0 < port < 65_536 else None,
    )


def _listed_sources(listed: Any, host: str) -> dict[int, EventSource]:
    """The sockets that an engine lists, by rank, in any of the forms in use: vLLM 0.33's map from rank to its publisher's
    configuration, the array from the change that introduced it, and SGLang's array of the ranks on its own node."""
    rows: list[tuple[Any, Any]] = []
    if isinstance(listed, Mapping):
        rows = [(int(rank), one) for rank, one in listed.items() if str(rank).isdecimal()]
    elif isinstance(listed, list):
        entries = [one for one in listed if isinstance(one, Mapping)]
        rows = [(one.get("data_parallel_rank", one.get("dp_rank")), one) for one in entries]
    return {
        rank: EventSource(
            resolve_endpoint(str(one["endpoint"]), host),
            resolve_endpoint(str(replay), host) if (replay := one.get("replay_endpoint")) else None,
            str(one.get("topic") or ""),
            rank,
        )
        for rank, one in rows
        if isinstance(rank, int) and isinstance(one, Mapping) and one.get("endpoint")
    }


def resolve_endpoint(endpoint: str, host: str) -> str:
    """An endpoint that an engine reports, as an address to connect to. `host`: the engine's host, from its HTTP address."""
    scheme, _, rest = endpoint.partition("://")
    name, colon, port = rest.rpartition(":")
    if scheme != "tcp" or not colon:
        return endpoint
    if name in _WILDCARDS or (_is_loopback(name) and not _is_loopback(host)):
        name = f"[{host}]" if ":" in host else host
    return f"tcp://{name}:{port}"


def shift_port(endpoint: str, by: int) -> str:
    """The endpoint with `by` added to its port; unchanged if it has none."""
    address, colon, port = endpoint.rpartition(":")
    return f"{address}:{int(port) + by}" if colon and port.isdigit() and endpoint.startswith("tcp://") else endpoint


async def _list_models(client: httpx.AsyncClient, url: str) -> Sequence[Mapping[str, Any]]:
    try:
        listed = await client.get("/v1/models")
        await _refuse_own_server(client, url)
        answer = listed.raise_for_status().json()
        cards = [card for card in answer["data"] if card["id"]]
    except httpx.HTTPStatusError as error:
        status = error.response.status_code
        cure = KEY_CURE if status in REFUSED else "give endpoint= and model="
        raise Unreachable(f"engine at {url}/v1/models: status {status}; {cure}") from error
    except httpx.HTTPError as error:
        line = f"engine at {url}/v1/models: {_describe(error)}; start it first, or give endpoint= and model="
        raise Unreachable(line) from error
    except (ValueError, LookupError, TypeError) as error:
        raise Unreachable(f"engine at {url} does not list a model; give it with model=") from error
    if all(card.get("parent") for card in cards):
        raise Unreachable(f"engine at {url} does not list a model; give it with model=")
    return cards


async def _refuse_own_server(client: httpx.AsyncClient, url: str) -> None:
    """Raise Unreachable if a kvatlas server answers there, because it may stand for several engines."""
    shown = await _get_json(client, "/version")
    server = str(shown.get("server")) if isinstance(shown, Mapping) else ""
    if server.startswith("kvatlas "):
        raise Unreachable(f"{url} is a {server:.40}, not an engine; give the engines' own addresses")


def _describe(error: httpx.HTTPError) -> str:
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__


async def _get_sglang_info(client: httpx.AsyncClient) -> Mapping[str, Any]:
    for path in ("/server_info", "/get_server_info"):
        info = await _get_json(client, path)
        if isinstance(info, Mapping):
            return info
    return {}


async def _get_json(client: httpx.AsyncClient, path: str) -> Any:
    """Get the JSON at a path; None if there is none."""
    try:
        answer = await client.get(path)
        return answer.json() if answer.status_code == 200 else None
    except httpx.HTTPError as error:
        raise Unreachable(f"engine at {client.base_url}{path}: {_describe(error)}") from error
    except ValueError:
        return None


def _cache_config(metrics_page: str) -> tuple[int, int | None, bool]:
    """(data-parallel ranks, tokens per block, True if prefix caching is on) from vLLM's metrics."""
    lines = [line for line in metrics_page.splitlines() if line.startswith(_INFO)]
    ranks: set[str] = set()
    block_size: int | None = None
    caching = True
    try:
        for family in text_string_to_metric_families("\n".join(lines) + "\n"):
            for sample in family.samples:
                ranks.add(sample.labels.get("engine", "0"))
                size = sample.labels.get("block_size", "")
                block_size = int(size) if size.isdigit() else block_size
                caching = sample.labels.get("enable_prefix_caching") != "False"
    except ValueError:
        return 0, None, True
    return len(ranks), block_size, caching


async def _check_sockets(offer: EngineOffer) -> EngineOffer:
    """Drop replay sockets that don't listen. If an event socket doesn't listen, drop it if it was only assumed; otherwise add
    a note about it."""
    sources: list[EventSource] = []
    notes = list(offer.notes)
    for source in offer.sources:
        if not await _is_listening(source.endpoint):
            if offer.assumed:
                continue
            notes.append(f"nothing listens at {source.endpoint} yet; {_REMEDIES.get(offer.kind, '')}")
        elif source.replay_endpoint is not None and not await _is_listening(source.replay_endpoint):
            notes.append(f"nothing listens at {source.replay_endpoint}; lost events can't be replayed")
            source = replace(source, replay_endpoint=None)
        sources.append(source)
    return replace(offer, sources=sources, notes=notes)


async def _is_listening(endpoint: str) -> bool:
    if not endpoint.startswith("tcp://"):
        return True
    parts = urlsplit(endpoint)
    try:
        with anyio.fail_after(CONNECT_S):
            stream = await anyio.connect_tcp(parts.hostname or "", parts.port or 0)
            await stream.aclose()
    except (OSError, TimeoutError):
        return False
    return True


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"
