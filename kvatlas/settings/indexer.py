"""Settings of `kvatlas indexer`."""

from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from pydantic import Field

from kvatlas.errors import SettingsError
from kvatlas.fleet.fleet_identity import FleetId
from kvatlas.settings.field_types import Name, PartitionCount, Port, Seconds, WorkerId
from kvatlas.settings.http import HttpSettings
from kvatlas.settings.process import COMMON, HelpGroups, Settings
from kvatlas.validation import Positive


class IndexerSettings(Settings, HttpSettings):
    """Settings of one indexer process."""

    help_groups: ClassVar[HelpGroups] = {
        COMMON: "nats_url redis_url status_port identities retire_after_s",
        "Index": "partitions shards layout fleet_id side_index scrub_period_s member_id",
        "Event stream": "stream_replicas stream_max_bytes stream_max_age_s stream_storage",
        "HTTP server": "status_host",
    }

    member_id: WorkerId | None = Field(default=None, description="Name of this replica; default: host name and pid.")
    fleet_id: FleetId | None = Field(
        default=None,
        description="Id of this indexer's fleet, 12 hexadecimal digits. The indexer refuses a store or a NATS of "
        "another fleet. An empty store joins the fleet, even while other indexers use another store, "
        "to move to another Redis (`kvatlas doctor` shows the id). Default: the fleet of store and "
        "NATS, or a new one.",
    )
    partitions: PartitionCount | None = Field(
        default=None,
        description="Partitions of the stream; default: those of the store's layout, 64 in an empty store.",
    )
    shards: PartitionCount | None = Field(
        default=None, description="Shards of the index; default: those of the store's layout, 1 in an empty store."
    )
    retire_after_s: Seconds = Field(
        default=60, description="Seconds without a heartbeat after which a worker is retired and its blocks dropped."
    )
    layout: int | None = Field(
        default=None,
        ge=0,
        le=9_999,
        description="Number of the layout to fill; default: the layout that answers (`kvatlas layout`).",
    )
    side_index: bool | None = Field(
        default=None,
        description="Store each block's parent too, so that `kvatlas children` can list what follows a prefix; "
        "default: as the store was laid out, off in an empty store.",
    )
    identities: Path | None = Field(
        default=None,
        description="File with the workers, tenants, models and addresses that each publisher may publish "
        "(`kvatlas auth nats` writes it); default: no limits.",
    )
    status_host: Name = Field(default="127.0.0.1", description="Address of the status page.")
    status_port: Port | None = Field(
        default=None, description="Port of the status page; 0: any free port; default: no page."
    )
    scrub_period_s: float = Field(
        default=600.0, gt=0, description="Seconds in which the scrub recounts all blocks once."
    )
    stream_replicas: Positive = Field(
        default=1, description="Replicas of the event stream, if this indexer creates it."
    )
    stream_max_bytes: Positive = Field(default=1 << 30, description="Largest size of the event stream in bytes.")
    stream_max_age_s: Seconds = Field(default=1800, description="Seconds for which the event stream keeps a message.")
    stream_storage: Literal["file", "memory"] = Field(default="file", description="Storage of the event stream.")

    @classmethod
    def load(cls, **flags: Any) -> Self:
        """See `ProcessSettings.load`. If both are given, the shards must divide the partitions."""
        settings = super().load(**flags)
        if settings.shards and settings.partitions and settings.partitions % settings.shards:
            line = f"--shards is {settings.shards}; expected a divisor of {settings.partitions} partitions"
            raise SettingsError(line)
        return settings
