"""A whole simulated engine: cache, scheduler, KV event feed and HTTP server, until it is cancelled."""

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import anyio
from starlette.types import ASGIApp

from kvatlas.http.access import HttpAccess
from kvatlas.http.server import listen, serve
from kvatlas_simulator.cache.block_hash import BlockHasher
from kvatlas_simulator.cache.kv_cache import KVCache
from kvatlas_simulator.cache.resident_blocks import list_resident_blocks
from kvatlas_simulator.engine.core import EngineCore
from kvatlas_simulator.engine.engine_cache import EngineCache
from kvatlas_simulator.engine.loop import EngineLoop, NoEvents
from kvatlas_simulator.http.kv_fetch import KvFetches, connector_config
from kvatlas_simulator.http.kv_transfer import KvTransfers
from kvatlas_simulator.http.server import EngineApi
from kvatlas_simulator.hybrid_cache import HybridCache, Retention
from kvatlas_simulator.hybrid_cache.resident_blocks import list_hybrid_blocks
from kvatlas_simulator.settings import EngineSettings
from kvatlas_simulator.zmq_events import open_feed

GRACE_S = 2
"""How long open responses may continue after the engine has been asked to stop."""


@dataclass(frozen=True, slots=True)
class EngineAddresses:
    """The addresses of a running engine, with real ports."""

    base_url: str
    endpoint: str
    replay_endpoint: str | None


async def run_engine(
    settings: EngineSettings,
    ready: Callable[[EngineAddresses], None] | None = None,
    wrap: Callable[[ASGIApp], ASGIApp] = lambda application: application,
) -> None:
    """Run one engine until cancelled. Calls `ready` once the HTTP server and both event sockets are up. `wrap`: wraps the
    engine's HTTP application.

    Raises SettingsError for an address that can't be listened on. Nothing outlives the call.
    """
    async with open_feed(settings.encoding, settings.feed) as feed:
        access = HttpAccess(origins=("*",))  # engines have no rule for pages in browsers
        listener = listen(settings.host, settings.port, "the engine's HTTP server", access)
        addresses = EngineAddresses(listener.url, feed.endpoint, feed.replay_endpoint)
        sink = feed if settings.events else NoEvents()
        hasher = settings.hasher(secrets.randbits(64))
        cache, resident_blocks = _build_cache(settings, hasher)
        core = EngineCore(
            cache,
            model=settings.model,
            limits=settings.limits,
            cost=settings.cost,
            vocab_size=settings.vocab_size,
            answers_text=settings.answers_text,
        )
        engine = EngineLoop(core, sink, speed_up=settings.speed_up)
        api = EngineApi(
            engine,
            model=settings.model,
            adapters=settings.adapters,
            vocab_size=settings.vocab_size,
            resident_blocks=resident_blocks,
            keep_alive_s=settings.sse_keep_alive_interval,
            transfers=KvTransfers(engine, settings.disaggregation, settings.transfer_us_per_token, settings.speed_up),
            fetches=KvFetches(engine, settings.kv_connector, hasher, settings.transfer_us_per_token, settings.speed_up),
            connector_config=connector_config(settings.kv_connector, listener.url),
            scale_out=settings.enable_scale_out,
            health_waits=settings.health_waits,
            event_source={
                "enable_kv_cache_events": True,
                "publisher": "zmq",
                "endpoint": feed.endpoint,
                "replay_endpoint": feed.replay_endpoint,
                "topic": settings.topic,
            }
            if settings.events
            else None,
        )
        async with anyio.create_task_group() as running:
            running.start_soon(feed.serve_replay)
            running.start_soon(engine.run)
            await running.start(partial(serve, grace_s=GRACE_S), wrap(api.application()), listener)
            if ready is not None:
                ready(addresses)


def _build_cache(
    settings: EngineSettings, hasher: BlockHasher
) -> tuple[EngineCache, Callable[[], list[dict[str, Any]]]]:
    """Build the cache for the model's groups, and a function that lists its blocks. Raises InvalidValue for sizes that don't
    fit together."""
    if settings.is_hybrid:
        hybrid = HybridCache(
            settings.cache_groups,
            num_blocks=settings.num_gpu_blocks,
            block_size=settings.block_size,
            retention=Retention(settings.retention_interval),
            hasher=hasher,
        )
        return hybrid, partial(list_hybrid_blocks, hybrid)
    cache = KVCache(
        num_blocks=settings.num_gpu_blocks,
        block_size=settings.block_size,
        hasher=hasher,
        eviction=settings.eviction,
        num_cpu_blocks=settings.num_cpu_blocks,
        report_hits=settings.report_hits,
    )
    return cache, partial(list_resident_blocks, cache)
