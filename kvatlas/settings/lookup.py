"""Settings of every process that looks up the prompts of requests in the index: routers and the index server."""

from dataclasses import replace
from pathlib import Path

from pydantic import Field

from kvatlas.identity import DEFAULT_TENANT
from kvatlas.settings.engine import EngineAccessSettings
from kvatlas.settings.field_types import CommaList, Name
from kvatlas.settings.process import Settings
from kvatlas.store.access import RedisAccess
from kvatlas.validation import Positive

MOST_TOKENIZER_DEADLINE_MS = 1_000.0
"""In a burst, all prompts are late at the same time; waiting longer than this costs a client more than a miss does."""


class LookupSettings(EngineAccessSettings, Settings):
    """How a request's prompt is read, and where it is looked up."""

    tokenizer: Name = Field(
        default="engine",
        description="Source of a request's token ids: `engine` asks an engine's /tokenize; `none` routes by load alone; "
        "anything else is a folder with the model's tokenizer.json and chat template.",
    )
    tokenizer_deadline_ms: float = Field(
        default=200.0, gt=0, description="Milliseconds to get a request's token ids; after that it is routed by load."
    )
    tenant_id: Name = Field(default=DEFAULT_TENANT, description="Tenant of the requests.")
    salt_is_tenant: bool = Field(default=False, description="Use a request's cache salt as its tenant.")
    read_replicas: bool = Field(
        default=False,
        description="Read overlaps from the replicas of a Redis or Valkey cluster, up to 3 seconds late; choices are booked at "
        "its primaries.",
    )
    replica: bool = Field(
        default=False,
        description="Keep a copy of the index in this process, fed by NATS: overlaps need no call to the store.",
    )
    replica_memory_mib: Positive = Field(
        default=1_024, description="MiB that the copy may take, as estimated; beyond that the store answers."
    )
    replica_file: Path | None = Field(
        default=None,
        description="File that keeps the copy, so that it is warm after a restart; one for each process. Default: none.",
    )
    engine_addresses: CommaList = Field(
        default=(),
        description="Networks and names of engines, separated by commas (10.1.0.0/16, *.engines.svc:8000); default: what "
        "publishers' identities allow, and private addresses (loopback ones if this router is on loopback).",
    )

    @property
    def most_tokenizer_deadline_ms(self) -> float:
        """Upper bound of the tokenizer's deadline as long as the tokenizer is slow but still answers."""
        return MOST_TOKENIZER_DEADLINE_MS

    @property
    def redis(self) -> RedisAccess:
        """How to connect to the store."""
        return replace(super().redis, read_replicas=self.read_replicas)
