"""Settings of `kvatlas index-server`."""

from typing import ClassVar

from pydantic import Field

from kvatlas.settings.clients import ClientSettings
from kvatlas.settings.field_types import Port
from kvatlas.settings.lookup import LookupSettings
from kvatlas.settings.process import COMMON, HelpGroups


class IndexServerSettings(LookupSettings, ClientSettings):
    """One replica of the index server."""

    help_groups: ClassVar[HelpGroups] = {
        COMMON: "redis_url host port tokenizer replica",
        "Requests": "tokenizer_deadline_ms tenant_id salt_is_tenant",
        "Index": "read_replicas replica_memory_mib replica_file",
        "Engines": "engine_addresses",
        "Clients": "clients_file grpc_port",
    }

    port: Port = Field(default=8090, description="Port of the HTTP queries; 0: any free port.")
    grpc_port: Port | None = Field(
        default=None,
        description="Port of the gRPC queries (extra gateway); 0: any free port. Default: there are none.",
    )
