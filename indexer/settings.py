"""What one indexer replica is told."""

import os
import socket
from secrets import token_hex
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from kvatlas.bus import StreamSettings


def default_replica_id() -> str:
    """Host, process and a random part: no two replicas are ever called the same."""
    host = "".join(c if c.isalnum() or c in "-_" else "-" for c in socket.gethostname())[:40] or "host"
    return f"{host}-{os.getpid()}-{token_hex(3)}"


class IndexerSettings(BaseModel):
    """`partitions` and `shards` are the store's layout: the first indexer makes it, others must agree.

    The stream's settings count only for the replica that makes the stream. `wait`: servers that don't answer at the
    start are waited for. The status page is served where `status_port` is given; 0 takes a free port.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    nats_url: str = "nats://127.0.0.1:4222"
    redis_url: str = "redis://127.0.0.1:6379"
    partitions: Annotated[int, Field(ge=1, le=4_096)] = 64
    shards: Annotated[int, Field(ge=1, le=4_096)] = 1
    replica_id: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,128}$", default_factory=default_replica_id)]
    stream_replicas: Annotated[int, Field(ge=1, le=5)] = 1
    stream_max_bytes: Annotated[int, Field(ge=1 << 20)] = 1 << 30
    stream_max_age_s: Annotated[int, Field(ge=1)] = 30 * 60
    stream_storage: Literal["file", "memory"] = "file"
    wait: bool = True
    status_host: str = "127.0.0.1"
    status_port: Annotated[int, Field(ge=0, le=65_535)] | None = None

    @model_validator(mode="after")
    def _shards_divide_partitions(self) -> Self:
        if self.partitions % self.shards:
            raise ValueError(f"{self.shards} shards do not divide {self.partitions} partitions")
        return self

    @property
    def stream(self) -> StreamSettings:
        return StreamSettings(
            replicas=self.stream_replicas,
            max_bytes=self.stream_max_bytes,
            max_age_s=self.stream_max_age_s,
            storage=self.stream_storage,
        )
