"""Settings of a simulated engine: flags and environment variables, as for every command."""

from typing import ClassVar

from pydantic import Field, ValidationInfo, field_validator

from kvatlas.blocks.kv_cache_groups import AttentionKind
from kvatlas.fleet.records import KvConnector
from kvatlas.settings import COMMON, CommaList, HelpGroups, Name, Port, ProcessSettings, ZmqEndpoint
from kvatlas.validation import Count, Positive
from kvatlas_simulator.cache.block_hash import SeededBlockHasher
from kvatlas_simulator.cache.eviction import BuiltInPolicy
from kvatlas_simulator.engine.scheduler import SchedulerLimits
from kvatlas_simulator.engine.step_cost import StepCost
from kvatlas_simulator.http.kv_transfer import Disaggregation
from kvatlas_simulator.hybrid_cache.groups import CacheGroup, parse_groups
from kvatlas_simulator.zmq_events import EventEncoding, FeedSettings

_RATES = StepCost()
TOKEN_BYTES = 128 << 10
"""KV bytes per token of the model behind the default rates."""
MAX_GPU_BLOCKS = 1 << 22
"""Maximum number of blocks, each of which is an object of some hundreds of bytes."""


class EngineSettings(ProcessSettings):
    """Settings of one simulated engine. Use `load`: it turns a mistake into one clear line."""

    help_groups: ClassVar[HelpGroups] = {
        COMMON: "model port endpoint block_size num_gpu_blocks",
        "HTTP server": "host adapters vocab_size answers_text enable_scale_out disaggregation kv_connector kv_gib_per_s "
        "health_waits sse_keep_alive_interval",
        "KV events": "replay_endpoint bind topic events buffer_steps self_describing_offload report_hits",
        "KV cache": "num_cpu_blocks eviction groups retention_interval seed",
        "Scheduler": "max_num_seqs max_num_batched_tokens queue_limit",
        "Speed": "speed_up prefill_us_per_token decode_step_us",
    }

    model: Name = Field(default="mock-model", description="Model that it serves.")
    adapters: CommaList = Field(default=(), description="LoRA adapters that it serves, separated by commas.")
    vocab_size: int = Field(default=128_256, ge=512, le=2**32, description="Vocabulary size; token ids are below it.")

    answers_text: bool = Field(
        default=False,
        description="Answer with text that depends only on the text before it: another such engine, given the prompt and a "
        "part of the answer, continues with the same text.",
    )

    host: Name = Field(default="127.0.0.1", description="Address of its HTTP server.")
    port: Port = Field(default=8000, description="Port of its HTTP server; 0: any free port.")
    enable_scale_out: bool = Field(
        default=False,
        description="Also serve token ids and render requests (/inference/v1/generate, .../render), as vLLM with that flag.",
    )
    endpoint: ZmqEndpoint = Field(
        default="tcp://127.0.0.1:5557", description="Where KV events are published; port 0: any free port."
    )
    replay_endpoint: ZmqEndpoint | None = Field(
        default="tcp://127.0.0.1:5558", description="Where KV events are replayed; port 0: any free port."
    )
    bind: bool = Field(
        default=True, description="Bind the event endpoint; if off, bind only one with *, :: or ipc, as vLLM does."
    )
    topic: str = Field(default="", description="Topic of the KV events.")
    events: bool = Field(
        default=True, description="Publish KV events; if off, offer none, as vLLM without --kv-events-config."
    )
    buffer_steps: Positive = Field(default=10_000, description="Batches kept for replay.")
    self_describing_offload: bool = Field(
        default=True, description="Events of the CPU tier carry tokens; if off, they only name hashes."
    )

    report_hits: bool = Field(
        default=False, description='Report found blocks as stored again, as vLLM with kv_cache_report_mode="full".'
    )

    block_size: Positive = Field(default=16, description="Tokens per block.")
    num_gpu_blocks: int = Field(default=4_096, ge=1, le=MAX_GPU_BLOCKS, description="Blocks on the GPU.")
    num_cpu_blocks: Count = Field(default=0, description="Blocks in the CPU tier; 0: no CPU tier.")
    eviction: BuiltInPolicy = Field(default=BuiltInPolicy.LRU, description="Which cached block is evicted first.")
    groups: CommaList = Field(
        default=("full",),
        description="KV cache groups, separated by commas: full, swa:WINDOW, chunked:SIZE, mamba; several make a hybrid.",
    )
    retention_interval: Count = Field(
        default=0,
        description="Hybrids: sliding windows and mamba also keep what a request needs at multiples of this many tokens.",
    )
    seed: int | None = Field(default=None, description="Seed of its block hashes; default: random.")

    max_num_seqs: Positive = Field(default=256, description="Sequences that run at the same time.")
    max_num_batched_tokens: Positive = Field(default=8_192, description="Tokens computed in one step.")
    queue_limit: Positive = Field(default=1_024, description="Limit of waiting requests; any more get a 503.")

    speed_up: float = Field(default=1.0, gt=0, le=1e6, description="Simulated seconds per real second.")
    prefill_us_per_token: float = Field(
        default=_RATES.prefill_us_per_token, ge=0, description="Microseconds to compute a prompt token."
    )
    decode_step_us: float = Field(
        default=_RATES.decode_step_us, ge=0, description="Microseconds of a step in which anything decodes."
    )

    health_waits: bool = Field(
        default=False, description="Answer /health only after the prompts in progress, as SGLang does."
    )
    disaggregation: Disaggregation = Field(
        default=Disaggregation.NONE,
        description="Compute prompts and answers on separate engines: in vLLM's request form (either part, as each request "
        "says), or SGLang's.",
    )

    kv_connector: KvConnector | None = Field(
        default=None,
        description="Fetch KV from the engine that a request names, and let others fetch: p2p (vLLM's OffloadingConnector), "
        "kvcr (kv.fetch hints). Engines that fetch from each other need one --seed.",
    )
    kv_gib_per_s: float = Field(
        default=40.0, gt=0, description="Bandwidth of what others fetch from it, in GiB/s; a token's KV has 128 KiB."
    )

    sse_keep_alive_interval: float = Field(
        default=0.0, ge=0, le=3600, description="A stream that waits this many seconds sends a comment; 0: never."
    )

    @field_validator("adapters")
    @classmethod
    def _check_adapters(cls, adapters: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        names = (info.data.get("model"), *adapters)
        if len(set(names)) < len(names):
            raise ValueError("expected names that differ from each other and from the model's")
        return adapters

    @field_validator("groups")
    @classmethod
    def _check_groups(cls, groups: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        given = info.data
        parsed = parse_groups(groups)
        if len(parsed) > 1 and (
            given.get("num_cpu_blocks") or given.get("report_hits") or given.get("eviction") is not BuiltInPolicy.LRU
        ):
            raise ValueError("expected one group with --num-cpu-blocks, --report-hits or another --eviction than lru")
        if any(
            group.kind is AttentionKind.CHUNKED_LOCAL and group.tokens % given.get("block_size", 1) for group in parsed
        ):
            raise ValueError("expected chunks of a multiple of --block-size")
        return groups

    @field_validator("retention_interval")
    @classmethod
    def _check_retention_interval(cls, interval: int, info: ValidationInfo) -> int:
        if interval % info.data.get("block_size", 1):
            raise ValueError("expected a multiple of --block-size, or 0")
        return interval

    @property
    def is_hybrid(self) -> bool:
        return len(self.groups) > 1

    @property
    def cache_groups(self) -> tuple[CacheGroup, ...]:
        return parse_groups(self.groups)

    @property
    def limits(self) -> SchedulerLimits:
        return SchedulerLimits(self.max_num_seqs, self.max_num_batched_tokens, self.queue_limit)

    @property
    def cost(self) -> StepCost:
        return StepCost(
            prefill_us_per_token=self.prefill_us_per_token,
            decode_step_us=self.decode_step_us,
        )

    @property
    def encoding(self) -> EventEncoding:
        return EventEncoding(self.block_size, self.adapters, self.self_describing_offload, self.cache_groups)

    @property
    def feed(self) -> FeedSettings:
        return FeedSettings(self.endpoint, self.replay_endpoint, self.bind, self.topic, self.buffer_steps)

    @property
    def transfer_us_per_token(self) -> float:
        """The time that it takes to send a token's KV to another engine."""
        return TOKEN_BYTES / (self.kv_gib_per_s * (1 << 30)) * 1e6

    def hasher(self, random_seed: int) -> SeededBlockHasher:
        """The engine's own block hashes; `random_seed` is used if `seed` is not set."""
        return SeededBlockHasher(random_seed if self.seed is None else self.seed)
