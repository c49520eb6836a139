"""Messages of one partition, and the stream position that follows them."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvatlas.bus.wire import RawMessage


@dataclass(frozen=True, slots=True)
class Position:
    """A place in the stream: the stream's creation time (us since 1970) and the stream seq of the last applied message."""

    creation_us: int
    seq: int


@dataclass(frozen=True, slots=True)
class PartitionBatch:
    """Messages of one partition, in stream order, and the position after the last of them.

    If there is no `position`, the messages are applied outside the stream (direct writes). `after_seq` is the stream seq before
    the first message. If the store's position is lower (because it lost its last writes) or belongs to a different stream,
    nothing is applied, and the partition is listed in `ApplyResult.moved`.
    """

    partition: int
    messages: Sequence[RawMessage]
    position: Position | None = None
    after_seq: int | None = None
