"""An engine's Prometheus page: vLLM's metrics, and the simulator's own."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from kvatlas_simulator.cache.pressure import MemoryPressure
from kvatlas_simulator.engine.loop import EngineLoop

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class EngineMetrics(Collector):
    """Collects the engine's state at each scrape."""

    def __init__(self, engine: EngineLoop, *, model: str, started_at: float) -> None:
        """`started_at`: seconds since the epoch; changes when the engine is restarted."""
        self._engine = engine
        self._core = engine.core
        self._model = model
        self._started_at = started_at
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def page(self) -> bytes:
        """The page in Prometheus' text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        load, cache, stats = self._core.load, self._core.cache, self._core.cache.stats()
        yield self._gauge("vllm:num_requests_running", "Requests in the running batch.", load.running)
        yield self._gauge("vllm:num_requests_waiting", "Requests waiting to be processed.", load.waiting)
        yield self._gauge("vllm:kv_cache_usage_perc", "KV cache usage. 1 means 100 percent.", stats.utilisation)
        yield self._counter(
            "vllm:prefix_cache_queries",
            "Prompt tokens looked up in the prefix cache.",
            load.prefix_queries_tokens_total,
        )
        yield self._counter(
            "vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.", load.prefix_hits_tokens_total
        )
        yield self._counter("vllm:prompt_tokens", "Prefill tokens processed.", load.prompt_tokens_total)
        yield self._counter("vllm:generation_tokens", "Generation tokens processed.", load.generation_tokens_total)
        yield self._counter("vllm:num_preemptions", "Preemptions.", load.preemptions_total)
        yield self._cache_config()
        asleep = GaugeMetricFamily(
            "vllm:engine_sleep_state", "1 for the state that applies.", labels=["engine", "model_name", "sleep_state"]
        )
        for state, applies in (("awake", not self._engine.asleep), ("discard_all", self._engine.asleep)):
            asleep.add_metric(["0", self._model, state], float(applies))
        yield asleep
        start = GaugeMetricFamily("process_start_time_seconds", "Start time since the epoch, in seconds.")
        start.add_metric([], self._started_at)
        yield start
        for name, text, value in (
            ("allocations", "GPU blocks handed out.", stats.allocations),
            ("block_hits", "Prompt blocks found in the cache.", stats.hits),
            ("block_misses", "Prompt blocks not found in the cache.", stats.misses),
            ("evictions", "Cached blocks evicted from the GPU.", stats.evictions),
            ("copies", "Blocks copied on write.", stats.copies),
            ("swapped_out_blocks", "Blocks copied to the CPU tier.", stats.swapped_out),
            ("swapped_in_blocks", "Blocks copied back from the CPU tier.", stats.swapped_in),
            ("cpu_evictions", "Blocks evicted from the CPU tier.", stats.cpu_evictions),
        ):
            yield self._counter(f"kvatlas_simulator:{name}", text, value)
        for name, text, fraction in (
            ("block_hit_rate", "Share of looked-up prompt blocks that were found.", stats.hit_rate),
            ("fragmentation", "Share of empty slots in the blocks that sequences hold.", stats.fragmentation),
            ("cached_blocks", "GPU blocks with a hash.", stats.cached_blocks),
            ("cpu_blocks", "Blocks in the CPU tier.", stats.cpu_blocks),
        ):
            yield self._gauge(f"kvatlas_simulator:{name}", text, fraction)
        pressure = GaugeMetricFamily(
            "kvatlas_simulator:memory_pressure", "1 for the level that applies.", labels=["model_name", "level"]
        )
        for level in MemoryPressure:
            pressure.add_metric([self._model, level.label], 1.0 if level is cache.pressure else 0.0)
        yield pressure

    def _cache_config(self) -> Metric:
        cache = self._core.cache
        info = GaugeMetricFamily(
            "vllm:cache_config_info",
            "Information of the cache configuration.",
            labels=["block_size", "num_gpu_blocks", "num_cpu_blocks", "enable_prefix_caching", "engine", "model_name"],
        )
        info.add_metric(
            [str(cache.block_size), str(cache.num_blocks), str(cache.num_cpu_blocks), "True", "0", self._model], 1.0
        )
        return info

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, text, labels=["engine", "model_name"])
        family.add_metric(["0", self._model], value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(name, text, labels=["engine", "model_name"])
        family.add_metric(["0", self._model], value)
        return family
