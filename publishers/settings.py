"""Settings of one worker's publisher: facts about the worker that the fleet needs, and how the publisher works."""

from typing import Self

from pydantic import BaseModel, ConfigDict, Field

from kvatlas.blocks.block_sizes import BlockSizes
from kvatlas.blocks.tiers import Tier
from kvatlas.engine_access import NO_KEY, EngineAccess
from kvatlas.fleet.fleet_identity import FleetId
from kvatlas.fleet.records import EngineEndpoint, EngineKind, KvConnector, Role, WorkerId
from kvatlas.identity import DEFAULT_HASH_CHAIN, DEFAULT_TENANT, OWN_CHAIN, rank_worker_id
from kvatlas.settings import PublishSettings
from kvatlas.validation import (
    MAX_ITEMS,
    BlockBytes,
    BlockTokens,
    BootstrapPort,
    Count,
    Granularity,
    Name,
    Rank,
    Text,
    Url,
)
from kvatlas_publishers.engines.kv_geometry import read_token_bytes
from kvatlas_publishers.engines.metrics import LoadContext
from kvatlas_publishers.ledger.engine_groups import ReuseOfGroups
from kvatlas_publishers.ledger.ledger import LedgerSettings
from kvatlas_publishers.stream.checkpoints import CheckpointSettings
from kvatlas_publishers.stream.outbox import OutboxLimits

FETCHED_TIERS = (Tier.CPU_DRAM,)
"""The tiers from which connectors read by default: an engine serves its peers from its host memory."""


class PublisherSettings(BaseModel):
    """`block_bytes`: bytes of KV cache per block; 0: computed from `token_bytes`, or unknown if that is 0 too. `engine_url`:
    source of health and metrics; without it the engine counts as up. `partitions`: the number of partitions in the whole
    fleet. `events=False`: the engine publishes no events. `engine_id` and `hash_chain`: for the open event forms.
    `shared_store`: the store that the engine reads and writes. `read_setup_us` and `read_us_per_mib`: only for the publisher
    of a store. `fleet_id`: indexers of other fleets ignore the worker."""

    model_config = ConfigDict(defer_build=True, frozen=True, extra="forbid", protected_namespaces=())

    worker_id: WorkerId
    model_id: Name
    tokenizer_id: Name | None = None
    tenant_id: Name = DEFAULT_TENANT
    engine: EngineKind = EngineKind.VLLM
    block_size: BlockTokens | None = None
    block_bytes: BlockBytes = 0
    token_bytes: BlockBytes = 0
    granularity: Granularity = 1
    set_semantics: bool = False
    salt_is_tenant: bool = False
    eagle: bool = False
    eagle_groups: tuple[int, ...] = Field(default=(), max_length=MAX_ITEMS)
    chunk_size: Count = 0
    scheduler_block_size: Count = 0
    hybrid: bool = False
    store_ttl_s: Count = 0
    shared_store: WorkerId | None = None
    read_setup_us: Count | None = None
    read_us_per_mib: Count | None = None
    adapter_ids: dict[Text, Text] = Field(default_factory=dict, max_length=MAX_ITEMS)
    dp_rank: Rank | None = None
    engine_url: Url | None = None
    engine_access: EngineAccess = NO_KEY
    advertise_url: Url | None = None
    role: Role = Role.BOTH
    bootstrap_port: BootstrapPort | None = None
    labels: dict[Text, Text] = Field(default_factory=dict, max_length=MAX_ITEMS)
    locality_domain: Text = ""
    transfer_groups: tuple[Text, ...] = Field(default=(), max_length=MAX_ITEMS)
    kv_connector: KvConnector | None = None
    kv_port: BootstrapPort | None = None
    kv_tiers: tuple[Tier, ...] = ()
    partitions: int = Field(default=64, ge=1)
    checkpoint_s: float = Field(default=30.0, gt=0)
    checkpoint_messages: int = Field(default=1000, ge=1)
    outbox_bytes: int = Field(default=64 << 20, ge=1)
    outbox_messages: int = Field(default=65_536, ge=1)
    events: bool = True
    engine_id: Name | None = None
    hash_chain: Name = DEFAULT_HASH_CHAIN
    fleet_id: FleetId | None = None

    @classmethod
    def of(cls, settings: PublishSettings) -> Self:
        """Create the settings from those of a process, which have the same names. If they name a data-parallel rank,
        the worker is that rank."""
        rank = settings.dp_rank
        given = {name: getattr(settings, name) for name in cls.model_fields if hasattr(settings, name)}
        if rank is not None:
            given["worker_id"] = rank_worker_id(settings.worker_id, rank)
            given["kv_port"] = None if settings.kv_port is None else settings.kv_port + rank
        return cls(**given, token_bytes=_token_bytes(settings))

    @property
    def ledger(self) -> LedgerSettings:
        """The ledger's settings. Raises InvalidValue for names that are not valid in a scope."""
        return LedgerSettings(
            model_id=self.model_id,
            tokenizer_id=self.tokenizer_id or self.model_id,
            tenant_id=self.tenant_id,
            block_size=self.block_size,
            block_bytes=self.block_bytes,
            token_bytes=self.token_bytes,
            granularity=self.granularity,
            set_semantics=self.set_semantics or self.engine in (EngineKind.TENSORRT_LLM, EngineKind.OPEN),
            salt_is_tenant=self.salt_is_tenant or self.engine is EngineKind.OPEN,
            chunk_tokens=self.chunk_size,
            alignment_tokens=self.scheduler_block_size,
            eagle=self.eagle,
            eagle_groups=frozenset(self.eagle_groups),
            hybrid=self.hybrid,
            keep_untold=self.store_ttl_s > 0,
            has_store=self.shared_store is not None,
            adapter_ids=self.adapter_ids,
        )

    @property
    def outbox(self) -> OutboxLimits:
        return OutboxLimits(outbox_bytes=self.outbox_bytes, outbox_messages=self.outbox_messages)

    @property
    def checkpoints(self) -> CheckpointSettings:
        return CheckpointSettings(self.checkpoint_messages, self.checkpoint_s)

    @property
    def load_context(self) -> LoadContext:
        return LoadContext(
            worker_id=self.worker_id,
            kind=self.engine,
            dp_rank=self.dp_rank,
            locality_domain=self.locality_domain,
            block_size=self.block_size,
            block_bytes=self.block_bytes,
            token_bytes=self.token_bytes,
        )

    @property
    def _fetchable_tiers(self) -> tuple[str, ...]:
        """The labels of the tiers from which others can fetch."""
        return () if self.kv_connector is None else tuple(tier.label for tier in self.kv_tiers or FETCHED_TIERS)

    def endpoint(
        self, block_size: int | None, sizes: BlockSizes, reuse: ReuseOfGroups, chain: str | None = None
    ) -> EngineEndpoint:
        """The facts about the worker that routers need; `sizes`, `reuse` and `chain` are the ledger's."""
        return EngineEndpoint(
            id=self.worker_id,
            kind=self.engine,
            base_url=self.engine_url or "",
            advertised_url=self.advertise_url,
            role=self.role,
            bootstrap_port=self.bootstrap_port,
            labels=self.labels,
            model_id=self.model_id,
            tokenizer_id=self.tokenizer_id or self.model_id,
            tenant_id=self.tenant_id,
            locality_domain=self.locality_domain,
            transfer_groups=self.transfer_groups,
            kv_connector=self.kv_connector,
            kv_port=self.kv_port,
            kv_tiers=self._fetchable_tiers,
            dp_rank=self.dp_rank,
            block_size=block_size,
            block_bytes=sizes.block_bytes,
            tier_block_bytes={tier.label: size for tier, size in sizes.tier_bytes},
            granularity=self.granularity,
            eagle=reuse.eagle,
            groups=reuse.groups,
            alignment_tokens=reuse.alignment_tokens,
            lookahead_tokens=reuse.lookahead_tokens,
            marks=reuse.rule is not None,
            upper_bound=reuse.upper_bound,
            events=self.events,
            chain=chain or OWN_CHAIN,
            salt_is_tenant=self.ledger.salt_is_tenant,
            stores=() if self.shared_store is None else (self.shared_store,),
            read_setup_us=self.read_setup_us,
            read_us_per_mib=self.read_us_per_mib,
        )


def _token_bytes(settings: PublishSettings) -> int:
    """KV bytes per token from the model's configuration; 0 if there is no such file. Raises SettingsError."""
    if settings.model_config_path is None:
        return 0
    return read_token_bytes(settings.model_config_path, settings.kv_cache_dtype)
