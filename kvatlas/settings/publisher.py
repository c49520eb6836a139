"""Settings of `kvatlas publish`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, get_args

from pydantic import BeforeValidator, Field

from kvatlas.errors import SettingsError
from kvatlas.fleet.fleet_identity import FleetId
from kvatlas.fleet.records import EngineKind, KvConnector, Role
from kvatlas.identity import DEFAULT_HASH_CHAIN, DEFAULT_TENANT
from kvatlas.settings.engine import EngineAccessSettings
from kvatlas.settings.field_types import (
    MAX_SECONDS,
    CommaList,
    EngineUrl,
    GroupList,
    Labels,
    Name,
    NatsUrl,
    PartitionCount,
    Port,
    TierList,
    WorkerId,
    ZmqEndpoint,
)
from kvatlas.settings.http import HttpSettings
from kvatlas.settings.process import COMMON, HelpGroups, NatsSettings, missing_line, nats_url_field
from kvatlas.validation import (
    MAX_ITEMS,
    BlockBytes,
    BlockTokens,
    BootstrapPort,
    Count,
    Granularity,
    Positive,
    Rank,
    Text,
)


def fleet_id_field() -> Any:
    return Field(
        default=None,
        description="Id of the workers' fleet (`kvatlas doctor` shows it). Nothing is published on another fleet's "
        "NATS. Default: the fleet that uses this NATS.",
    )


def _check_kind(value: Any) -> Any:
    if value not in get_args(_Kinds):
        raise ValueError(
            "expected 'vllm', 'sglang', 'tensorrt_llm', 'open' or 'mock', the kinds whose events can be read, or 'store'"
        )
    return value


_Kinds = Literal[
    EngineKind.VLLM,
    EngineKind.SGLANG,
    EngineKind.TENSORRT_LLM,
    EngineKind.OPEN,
    EngineKind.MOCK,
    EngineKind.STORE,
]
PublishedKind = Annotated[_Kinds, BeforeValidator(_check_kind)]


class PublishSettings(EngineAccessSettings, NatsSettings, HttpSettings):
    """Settings of one publisher process: for one engine, or for all its ranks."""

    help_groups: ClassVar[HelpGroups] = {
        COMMON: "engine worker_id model_id endpoint engine_url",
        "Engine's events": "replay_endpoint topic bind events engine_id hash_chain set_semantics distrust_poison",
        "Worker": "advertise_url dp_rank dp_size role bootstrap_port locality_domain labels",
        "Fetching KV from other engines": "kv_connector kv_port kv_tiers transfer_groups",
        "Model and blocks": "tokenizer_id tenant_id salt_is_tenant adapter_ids block_size block_bytes model_config_path "
        "kv_cache_dtype eagle eagle_groups chunk_size hybrid scheduler_block_size",
        "Shared stores": "shared_store store_ttl_s read_setup_us read_us_per_mib lmcache_endpoint lmcache_model "
        "mooncake_endpoint",
        "Publishing": "fleet_id state_dir outbox_bytes granularity partitions",
        "HTTP server": "status_port status_host",
    }

    nats_url: NatsUrl = nats_url_field()
    engine: PublishedKind = Field(
        description="Kind of engine; open: one that sends the open event forms; mock: a simulated one; store: a shared store, "
        "whose blocks engines' publishers report."
    )
    events: bool = Field(
        default=True,
        description="The engine publishes KV events. Without them, routers predict its cache from the requests "
        "that they send to it.",
    )
    engine_id: Name | None = Field(
        default=None,
        description="Name of the engine in its batches (open event forms); default: the first one heard. Others' are ignored.",
    )
    hash_chain: Name = Field(
        default=DEFAULT_HASH_CHAIN,
        description="Name of the engine's own block hashes: requests find blocks that are published without token ids under "
        "the chain external:NAME (open event forms).",
    )
    endpoint: ZmqEndpoint | None = Field(
        default=None,
        description="The engine's event socket, e.g. tcp://127.0.0.1:5557; required with events. TensorRT-LLM has none.",
    )
    replay_endpoint: ZmqEndpoint | None = Field(default=None, description="The engine's replay socket.")
    worker_id: WorkerId = Field(description="Name of this worker in the fleet; with --dp-rank, that of the instance.")
    model_id: Name = Field(description="Model that the engine serves.")
    tokenizer_id: Name | None = Field(default=None, description="Tokenizer of the model; default: the model id.")
    tenant_id: Name = Field(default=DEFAULT_TENANT, description="Tenant that the blocks belong to.")
    block_size: BlockTokens | None = Field(
        default=None, description="Tokens in a block; default: learned from the events."
    )
    block_bytes: BlockBytes = Field(
        default=0, description="Bytes of KV cache in a block; 0: from --model-config-path, or as the engine reports."
    )
    model_config_path: Path | None = Field(
        default=None,
        description="The model's config.json, or its folder, from which the bytes of a block are computed.",
    )
    kv_cache_dtype: Text = Field(
        default="auto", description="Data type of the KV cache, as in the engine's flag; auto: the model's."
    )
    dp_rank: Rank | None = Field(
        default=None, description="Data-parallel rank N: N is added to the ports, and the worker is W-dpN."
    )
    dp_size: int | None = Field(
        default=None, ge=1, le=1024, description="Serve ranks 0 to N-1 in this process, each as with --dp-rank."
    )
    fleet_id: FleetId | None = fleet_id_field()
    state_dir: Path | None = Field(default=None, description="Folder for the saved ledger and dead letters.")
    outbox_bytes: Positive = Field(
        default=64 << 20,
        description="Bytes of messages kept while NATS is unreachable; an overflow ends in a snapshot.",
    )
    topic: Text = Field(default="", description="Topic of the event socket.")
    bind: bool = Field(default=False, description="Bind the endpoints (the engine connects) instead of connecting.")
    granularity: Granularity = Field(default=1, description="Publish only every g-th block of a chain.")
    partitions: PartitionCount = Field(default=64, description="Partitions of the stream, as in the store's layout.")
    set_semantics: bool = Field(
        default=False,
        description="Don't count copies, because the engine reports cache hits as stored again, or only the "
        "removal of the last copy.",
    )
    salt_is_tenant: bool = Field(default=False, description="Use an event's cache salt as its tenant.")
    distrust_poison: bool = Field(
        default=False,
        description="Drop all known blocks after an event of an unknown kind, even if it names no blocks.",
    )
    eagle: bool = Field(
        default=False, description="The engine speculates with EAGLE: it reuses one block less of a hit."
    )
    eagle_groups: GroupList = Field(
        default=(),
        description="KV cache groups with EAGLE's layers, separated by commas; default: those of full attention.",
    )
    chunk_size: Count = Field(
        default=0,
        description="Tokens in a chunk of chunked local attention (Llama 4: 8192), which no event contains. 0: unknown.",
    )
    hybrid: bool = Field(
        default=False,
        description="The model has more than full attention, and the engine's events don't show that "
        "(SGLang's hybrids).",
    )
    scheduler_block_size: Count = Field(
        default=0,
        description="Reuse is cut to multiples of this many tokens; 0: the smallest that fits the blocks of all groups.",
    )
    adapter_ids: Labels = Field(
        default_factory=dict,
        max_length=MAX_ITEMS,
        description="Names of adapters, for an engine that sends only their ids (vLLM before 0.14): id=name pairs, "
        "separated by commas. Blocks of other adapters are left out.",
    )
    store_ttl_s: Annotated[int, Field(ge=0, le=MAX_SECONDS)] = Field(
        default=0,
        description="Seconds for which to publish blocks whose removal the connector does not report (Mooncake, "
        "files, object stores). 0: they are left out.",
    )
    shared_store: WorkerId | None = Field(
        default=None,
        description="The shared store that the engine's connector reads and writes, by the --worker-id of the "
        "store's publisher.",
    )
    read_setup_us: Count | None = Field(
        default=None,
        description="For a shared store: microseconds until a read's first byte; default: those of its tier.",
    )
    read_us_per_mib: Count | None = Field(
        default=None,
        description="For a shared store: microseconds to read a MiB (5 GiB/s: 195); default: those of its tier.",
    )
    lmcache_endpoint: ZmqEndpoint | None = Field(
        default=None,
        description="Address of the LMCache multiprocess server that the engine is attached to, e.g. tcp://127.0.0.1:5555: "
        "the content of its CPU memory is published too. For a shared store: its own server.",
    )
    mooncake_endpoint: ZmqEndpoint | None = Field(
        default=None,
        description="For a shared store: the KV event socket of Mooncake's master, which reports evictions.",
    )
    lmcache_model: Name | None = Field(
        default=None, description="The model as the engine names it to LMCache; default: the model id."
    )
    engine_url: EngineUrl | None = Field(default=None, description="The engine's HTTP address, for health and metrics.")
    advertise_url: EngineUrl | None = Field(default=None, description="Address at which routers reach the engine.")
    role: Role = Field(default=Role.BOTH, description="What the worker computes: prefill, decode or both.")
    bootstrap_port: BootstrapPort | None = Field(
        default=None, description="Port of an SGLang prefill server's bootstrap server; default: 8998, as in SGLang."
    )
    locality_domain: Text = Field(default="", description="Where the worker runs: rack, zone, node.")
    labels: Labels = Field(
        default_factory=dict,
        max_length=MAX_ITEMS,
        description="Labels of the worker: name=value pairs, separated by commas.",
    )
    transfer_groups: CommaList = Field(
        default=(),
        max_length=MAX_ITEMS,
        description="Groups whose members' caches the worker can read, separated by commas; default: all that have its "
        "--kv-connector.",
    )
    kv_connector: KvConnector | None = Field(
        default=None,
        description="How the engine fetches KV that another engine holds: p2p (vLLM's OffloadingConnector with a p2p tier), "
        "kvcr (kv.fetch hints), lmcache (LMCache's P2P backend). Default: it can't, or as it is discovered.",
    )
    kv_port: BootstrapPort | None = Field(
        default=None,
        description="Port at which other engines fetch this engine's KV; the host is that of --advertise-url or "
        "--engine-url. A data-parallel rank is added. Default: other engines can't fetch.",
    )
    kv_tiers: TierList = Field(
        default=(),
        description="Tiers that others can fetch from, separated by commas; default: cpu_dram, from which all connectors read.",
    )
    status_host: Name = Field(default="127.0.0.1", description="Address of the status page.")
    status_port: Port | None = Field(
        default=None, description="Port of the status page; 0: any free port; default: no page."
    )

    @classmethod
    def load(cls, **flags: Any) -> Self:
        """See `ProcessSettings.load`. A shared store needs `block_size`, and also `store_ttl_s` unless it is LMCache's server.
        An engine with events needs `endpoint`, and an engine without events needs `engine_url`. TensorRT-LLM's events are read
        from `engine_url`."""
        settings = super().load(**flags)
        if settings.engine is EngineKind.STORE:
            settings._check_store()
            return settings
        for flag, given in (
            ("--read-setup-us", settings.read_setup_us),
            ("--read-us-per-mib", settings.read_us_per_mib),
            ("--mooncake-endpoint", settings.mooncake_endpoint),
        ):
            if given is not None:
                raise SettingsError(f"{flag} is {given}; remove it: it is only for --engine store")
        drained = settings.events and settings.engine is EngineKind.TENSORRT_LLM
        if drained:
            settings._check_drained()
        elif settings.events and settings.endpoint is None:
            if settings.engine is not EngineKind.OPEN:
                raise SettingsError(missing_line("endpoint", "expected the engine's event socket, or --no-events"))
            if settings.status_port is None:
                expected = "expected the engine's event socket, or --status-port for POST /events"
                raise SettingsError(missing_line("endpoint", expected))
        if not settings.events and settings.engine_url is None:
            expected = "expected the engine's HTTP address, the only source with --no-events"
            raise SettingsError(missing_line("engine_url", expected))
        settings._check_connector()
        if settings.dp_rank is not None and settings.dp_size is not None:
            raise SettingsError("--dp-rank and --dp-size are both given; set only one of them")
        return settings

    def _check_connector(self) -> None:
        """Check that settings for fetching come with a connector, because nothing is fetched without one."""
        for flag, given in (("--kv-port", self.kv_port), ("--kv-tiers", self.kv_tiers)):
            if given and self.kv_connector is None:
                raise SettingsError(f"{flag} is given without --kv-connector; set both")
        if self.kv_connector is KvConnector.P2P and self.engine not in (EngineKind.VLLM, EngineKind.MOCK):
            raise SettingsError(f"--kv-connector is p2p, but --engine is {self.engine.value}; expected --engine vllm")

    def _check_store(self) -> None:
        """Check a shared store: it has no engine addresses, and routers need its block size in order to look prompts up."""
        if self.block_size is None:
            raise SettingsError(missing_line("block_size", "expected the block size of the engines that use the store"))
        for flag, given in (
            ("--endpoint", self.endpoint),
            ("--replay-endpoint", self.replay_endpoint),
            ("--engine-url", self.engine_url),
            ("--shared-store", self.shared_store),
            ("--dp-rank", self.dp_rank),
            ("--dp-size", self.dp_size),
        ):
            if given is not None:
                raise SettingsError(f"{flag} is {given}; remove it: a shared store is not an engine")
        if not self.store_ttl_s and self.lmcache_endpoint is None:
            expected = (
                "expected a time after which a block counts as evicted, since evictions are not reported; or "
                "--lmcache-endpoint"
            )
            raise SettingsError(missing_line("store_ttl_s", expected))

    def _check_drained(self) -> None:
        """Check an engine whose events are read over HTTP: it has no sockets, and gives one answer for all its ranks."""
        if self.engine_url is None:
            raise SettingsError(
                missing_line("engine_url", "expected trtllm-serve's HTTP address, where events are read")
            )
        for flag, given in (
            ("--endpoint", self.endpoint),
            ("--replay-endpoint", self.replay_endpoint),
            ("--dp-rank", self.dp_rank),
            ("--dp-size", self.dp_size),
        ):
            if given is not None:
                raise SettingsError(f"{flag} is {given}; remove it: TensorRT-LLM's events are read at --engine-url")

    @property
    def ranks(self) -> Sequence[Self]:
        """The settings of each rank that the process serves; just these settings if there is no `dp_size`."""
        if self.dp_size is None:
            return [self]
        return [self.model_copy(update={"dp_rank": rank, "dp_size": None}) for rank in range(self.dp_size)]
