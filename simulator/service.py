"""A whole simulated engine: cache, scheduler, KV event feed and HTTP server, until it is cancelled."""

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import anyio

from kvatlas.runtime.http_server import listen, serve
from simulator.cache.kv_cache import KVCache
from simulator.engine.core import EngineCore
from simulator.engine.loop import EngineLoop, NoEvents
from simulator.http.server import EngineApi
from simulator.settings import EngineSettings
from simulator.zmq_events import open_feed

GRACE_S = 2
"""How long open responses may continue after the engine is told to stop."""


@dataclass(frozen=True, slots=True)
class EngineAddresses:
    """Where a running engine listens, with real ports."""

    base_url: str
    endpoint: str
    replay_endpoint: str | None


async def run_engine(settings: EngineSettings, ready: Callable[[EngineAddresses], None] | None = None) -> None:
    """Run one engine until cancelled. Calls `ready` once, when the HTTP server and both event sockets are up.

    Raises SettingsError for an address that can't be listened on. Nothing outlives the call.
    """
    async with open_feed(settings.encoding, settings.feed) as feed:
        listener = listen(settings.host, settings.port, "the engine's HTTP server")
        addresses = EngineAddresses(listener.url, feed.endpoint, feed.replay_endpoint)
        sink = feed if settings.events else NoEvents()
        engine = EngineLoop(_build_core(settings), sink, speed_up=settings.speed_up)
        api = EngineApi(
            engine,
            model=settings.model,
            adapters=settings.adapters,
            vocab_size=settings.vocab_size,
            event_source={
                "data_parallel_rank": 0,
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
            await running.start(partial(serve, grace_s=GRACE_S), api.application(), listener)
            if ready is not None:
                ready(addresses)


def _build_core(settings: EngineSettings) -> EngineCore:
    cache = KVCache(
        num_blocks=settings.num_gpu_blocks,
        block_size=settings.block_size,
        hasher=settings.hasher(secrets.randbits(64)),
        eviction=settings.eviction,
        num_cpu_blocks=settings.num_cpu_blocks,
        report_hits=settings.report_hits,
    )
    return EngineCore(
        cache, model=settings.model, limits=settings.limits, cost=settings.cost, vocab_size=settings.vocab_size
    )
