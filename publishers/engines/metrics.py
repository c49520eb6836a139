"""Reads an engine's state and load from its metrics page (pure; `kvatlas_publishers.engines.poller` fetches it).

Metric names are those of vLLM 0.9 to 0.33 (`vllm:*`) and SGLang 0.4.7 to 0.5.23 (`sglang:*`).

`queued_prefill_tokens` is an estimate: engines report how many requests are waiting, but not how long their prompts are. We
multiply the number of waiting requests by the mean prompt length so far (prompt tokens divided by finished requests). This
counts cached tokens as work, so it is too high if prompts share prefixes.

A page with an impossible number (infinite, negative, beyond 53 bits) is refused as a whole. Fractions are clamped to the range
from 0 to 1.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pydantic import ValidationError

from kvatlas.errors import DATA_ERRORS, InvalidValue
from kvatlas.fleet.records import EngineKind, ForwardPassMetrics, WorkerState
from kvatlas.validation import MAX_BLOCK_BYTES, MAX_BLOCK_TOKENS, MAX_NUMBER, describe_mistake

_PROCESS_START = "process_start_time_seconds"
_SLEEP = "vllm:engine_sleep_state"
_CONFIG = "vllm:cache_config_info"
MAX_SAMPLES = 10_000
"""Maximum number of samples of these metrics that are read."""
MAX_START_S = MAX_NUMBER // 1_000_000
_SAME_REQUESTS = {"tp_rank", "pp_rank", "moe_ep_rank", "pid"}


@dataclass(frozen=True, slots=True)
class _Names:
    """An engine's metric names. If there are several, the first one on the page counts; the others are older names."""

    running: str
    waiting: str
    usage: tuple[str, ...]
    prompt_tokens: str
    finished: tuple[str, ...]
    cache_queries: tuple[str, ...] = ()
    cache_hits: tuple[str, ...] = ()
    hit_rate: str = ""
    used_tokens: str = ""
    total_tokens: str = ""
    host_used_tokens: str = ""
    host_total_tokens: str = ""
    rank_labels: tuple[str, ...] = ()
    computed: tuple[str, ...] = ()
    """Counters that advance while the engine computes."""
    other_attention: tuple[str, ...] = ()
    """Gauges of pools for attention other than full. They are on every page, but above 0 only for hybrid models."""

    @property
    def all(self) -> set[str]:
        names = {self.running, self.waiting, self.prompt_tokens, self.hit_rate, self.used_tokens, self.total_tokens}
        names |= {self.host_used_tokens, self.host_total_tokens}
        names.update(
            self.usage, self.finished, self.cache_queries, self.cache_hits, self.other_attention, self.computed
        )
        return names - {""} | {_PROCESS_START, _SLEEP, _CONFIG}


_VLLM = _Names(
    running="vllm:num_requests_running",
    waiting="vllm:num_requests_waiting",
    usage=("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
    prompt_tokens="vllm:prompt_tokens_total",
    finished=("vllm:request_success_total",),
    cache_queries=("vllm:prefix_cache_queries_total", "vllm:gpu_prefix_cache_queries_total"),
    cache_hits=("vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total"),
    rank_labels=("engine",),
    computed=("vllm:generation_tokens_total", "vllm:iteration_tokens_total_count"),
)
_SGLANG = _Names(
    running="sglang:num_running_reqs",
    waiting="sglang:num_queue_reqs",
    usage=("sglang:token_usage",),
    prompt_tokens="sglang:prompt_tokens_total",
    finished=("sglang:num_requests_total",),
    hit_rate="sglang:cache_hit_rate",
    used_tokens="sglang:num_used_tokens",
    total_tokens="sglang:max_total_num_tokens",
    host_used_tokens="sglang:hicache_host_used_tokens",
    host_total_tokens="sglang:hicache_host_total_tokens",
    rank_labels=("dp_rank",),
    computed=("sglang:generation_tokens_total",),
    other_attention=(
        "sglang:swa_available_tokens",
        "sglang:swa_token_usage",
        "sglang:mamba_available_tokens",
        "sglang:mamba_usage",
    ),
)
_NAMES: Mapping[EngineKind, _Names] = {EngineKind.VLLM: _VLLM, EngineKind.MOCK: _VLLM, EngineKind.SGLANG: _SGLANG}


def has_metrics(kind: EngineKind) -> bool:
    """True if this engine kind has a readable metrics page. TensorRT-LLM's page returns each sample only once, so it does
    not count as one."""
    return kind in _NAMES


@dataclass(frozen=True, slots=True)
class LoadContext:
    """Facts about the engine that are not on the metrics page; 0: unknown. `token_bytes`: KV bytes per token, used if
    `block_bytes` is unknown. `host_block_bytes`: bytes per block in the host's memory, if different."""

    worker_id: str
    kind: EngineKind
    dp_rank: int | None = None
    locality_domain: str = ""
    block_size: int | None = None
    block_bytes: int = 0
    host_block_bytes: int = 0
    token_bytes: int = 0
    total_request_slots: int = 0
    total_tokens: int = 0


@dataclass(frozen=True, slots=True)
class EngineMetrics:
    """One sample of an engine's metrics. `process_start_s`: seconds since 1970; it changes when the engine restarts.
    `block_size`: tokens per block, if on the page; the engine's events take precedence. `block_bytes`: bytes per block; 0 if
    not on the page. `hybrid`: the engine has a cache for attention other than full. `prompt_tokens`: the total over all
    requests so far."""

    load: WorkerState
    asleep: bool = False
    process_start_s: float | None = None
    block_size: int | None = None
    block_bytes: int = 0
    hybrid: bool = False
    prompt_tokens: float = 0.0


def read_metrics(page: str, context: LoadContext, sampled_us: int) -> EngineMetrics:
    """Read an engine's `/metrics` page. Missing metrics count as 0.

    If an instance has several data-parallel ranks, only samples of the context's rank count. Raises InvalidValue for a
    page that is not in Prometheus' text format or has impossible numbers, or for an engine kind without metrics.
    """
    try:
        return _read(page, context, sampled_us)
    except ValidationError as error:
        first = error.errors()[0]
        path = ".".join(str(part) for part in first["loc"])
        raise InvalidValue(f"metrics page: {describe_mistake(path, first)}") from error


def _read(page: str, context: LoadContext, sampled_us: int) -> EngineMetrics:
    names = _NAMES.get(context.kind)
    if names is None:
        raise InvalidValue(f"engine kind {str(context.kind)!r} has no metrics page that can be read")
    samples = _Samples(page, names, context.dp_rank)
    waiting = samples.total(names.waiting)
    running = samples.total(names.running)
    usage = min(1.0, max(0.0, samples.first_max(names.usage)))
    total_blocks, block_size = _capacity(samples, names, context)
    active_blocks = _active_blocks(samples, names, usage, total_blocks, block_size)
    told_bytes = _told_block_bytes(samples, total_blocks)
    block_bytes = context.block_bytes or context.token_bytes * block_size or told_bytes
    host_used, host_total = _host_bytes(samples, names, block_size, context.host_block_bytes or block_bytes)
    load = WorkerState(
        id=context.worker_id,
        locality_domain=context.locality_domain,
        hbm_capacity_bytes=total_blocks * block_bytes,
        hbm_used_bytes=active_blocks * block_bytes,
        cpu_capacity_bytes=host_total,
        cpu_used_bytes=host_used,
        running_decodes=int(running),
        queued_prefill_tokens=int(waiting * samples.mean_prompt_tokens()),
        forward_pass=ForwardPassMetrics(
            active_request_slots=int(running),
            total_request_slots=max(context.total_request_slots, int(running)) if context.total_request_slots else 0,
            active_kv_blocks=active_blocks,
            total_kv_blocks=total_blocks,
            requests_waiting=int(waiting),
            cache_usage=usage,
            prefix_hit_rate=samples.hit_rate(),
        ),
        sampled_us=sampled_us,
        computed=samples.computed(),
    )
    awake = [value for labels, value in samples.of(_SLEEP) if labels.get("sleep_state") == "awake"]
    starts = [value for _, value in samples.of(_PROCESS_START) if value <= MAX_START_S]
    return EngineMetrics(
        load,
        asleep=bool(awake) and max(awake) == 0,
        process_start_s=max(starts) if starts else None,
        block_size=block_size or None,
        block_bytes=told_bytes,
        hybrid=any(samples.total(name) > 0 for name in names.other_attention),
        prompt_tokens=samples.total(names.prompt_tokens),
    )


class _Samples:
    """The samples of the metrics read here. Other lines, most of them histograms, are dropped before parsing."""

    def __init__(self, page: str, names: _Names, dp_rank: int | None) -> None:
        from prometheus_client.parser import text_string_to_metric_families  # brings an HTTP server: 2 MiB

        self._names = names
        self._by_name: dict[str, list[tuple[dict[str, str], float]]] = {}
        wanted = names.all
        lines = [line for line in page.splitlines() if line.partition("{")[0].partition(" ")[0] in wanted]
        if len(lines) > MAX_SAMPLES:
            raise InvalidValue(
                f"metrics page with {len(lines)} samples of the wanted metrics; expected at most {MAX_SAMPLES}"
            )
        rank = None if dp_rank is None else str(dp_rank)
        try:
            for family in text_string_to_metric_families("\n".join(lines) + "\n"):
                for sample in family.samples:
                    labels = sample.labels
                    is_fraction = sample.name in (*names.usage, names.hit_rate)
                    if not is_fraction and not (0 <= sample.value <= MAX_NUMBER or sample.value != sample.value):
                        raise InvalidValue(f"metrics page: {sample.name} is {sample.value}; expected 0 to {MAX_NUMBER}")
                    of_rank = next((labels[label] for label in names.rank_labels if label in labels), None)
                    if rank is None or of_rank is None or of_rank == rank:
                        self._by_name.setdefault(sample.name, []).append((labels, sample.value))
        except InvalidValue:
            raise
        except DATA_ERRORS as error:
            raise InvalidValue(f"not a metrics page: {error}") from error

    def of(self, name: str) -> Iterable[tuple[dict[str, str], float]]:
        return self._by_name.get(name, ())

    def total(self, name: str) -> float:
        """The sum over models and data-parallel ranks. Ranks that compute the same requests together are counted once."""
        together: dict[frozenset[tuple[str, str]], float] = {}
        for labels, value in self.of(name):
            if value == value:
                one = frozenset(item for item in labels.items() if item[0] not in _SAME_REQUESTS)
                together[one] = max(value, together.get(one, 0.0))
        return sum(together.values())

    def first_max(self, names: Iterable[str]) -> float:
        """The largest sample of the first name on the page. For a usage, that is the usage of the fullest pool."""
        for name in names:
            values = [value for _, value in self.of(name) if value == value]
            if values:
                return max(values)
        return 0.0

    def first_total(self, names: Iterable[str]) -> float:
        """The total of the first name on the page."""
        return next((self.total(name) for name in names if self.of(name)), 0.0)

    def mean_prompt_tokens(self) -> float:
        finished = self.first_total(self._names.finished)
        return self.total(self._names.prompt_tokens) / finished if finished else 0.0

    def computed(self) -> int:
        names = (*self._names.computed, self._names.prompt_tokens, *self._names.finished)
        return min(MAX_NUMBER, int(sum(self.total(name) for name in names)))

    def hit_rate(self) -> float:
        queries = self.first_total(self._names.cache_queries)
        rate = self.first_total(self._names.cache_hits) / queries if queries else self.first_max([self._names.hit_rate])
        return min(1.0, max(0.0, rate))


def _capacity(samples: _Samples, names: _Names, context: LoadContext) -> tuple[int, int]:
    """(blocks in the engine's device cache, tokens per block); 0 if unknown."""
    block_size = context.block_size or 0
    blocks = 0
    for labels, _ in samples.of(_CONFIG):
        blocks = _number(labels.get("num_gpu_blocks"))
        block_size = block_size or _number(labels.get("block_size"), MAX_BLOCK_TOKENS)
    tokens = int(samples.total(names.total_tokens)) or context.total_tokens
    if not blocks and tokens and block_size:
        blocks = tokens // block_size
    return blocks, block_size


def _told_block_bytes(samples: _Samples, total_blocks: int) -> int:
    """Bytes per block: the cache's size divided by its number of blocks. vLLM reports the size (per GPU) only if it was
    set at start. 0: unknown."""
    sizes = [_number(labels.get("kv_cache_memory_bytes")) for labels, _ in samples.of(_CONFIG)]
    return min(MAX_BLOCK_BYTES, max(sizes, default=0) // total_blocks) if total_blocks else 0


def _host_bytes(samples: _Samples, names: _Names, block_size: int, block_bytes: int) -> tuple[int, int]:
    """(used, total) bytes of the cache in host memory; 0 if unknown. vLLM reports only the total: in blocks, or in GiB for the
    offloading connector."""
    if block_size and list(samples.of(names.host_total_tokens)):
        used, total = (int(samples.total(name)) for name in (names.host_used_tokens, names.host_total_tokens))
        return used * block_bytes // block_size, total * block_bytes // block_size
    total = 0
    for labels, _ in samples.of(_CONFIG):
        gibibytes = _decimal(labels.get("kv_offloading_size"))
        total = _number(labels.get("num_cpu_blocks")) * block_bytes or int(gibibytes * (1 << 30))
    return 0, total


def _active_blocks(samples: _Samples, names: _Names, usage: float, total_blocks: int, block_size: int) -> int:
    used_tokens = int(samples.total(names.used_tokens))
    if used_tokens and block_size:
        return min(total_blocks, -(-used_tokens // block_size)) if total_blocks else -(-used_tokens // block_size)
    return round(usage * total_blocks)


def _decimal(text: str | None) -> float:
    """A decimal number; 0 for other text, and for a size that no machine has."""
    try:
        value = float(text or 0)
    except ValueError:
        return 0.0
    return value if 0 <= value <= MAX_NUMBER >> 30 else 0.0


def _number(text: str | None, largest: int = MAX_NUMBER) -> int:
    """A whole number; 0 for other text. Raises InvalidValue for a number above `largest`."""
    if text is None or not text.isascii() or not text.isdecimal():
        return 0
    if len(text) > 20 or int(text) > largest:
        raise InvalidValue(f"metrics page: {text:.40} in {_CONFIG}; expected at most {largest}")
    return int(text)
