"""Where the reading of a partition begins (the only rule of the stored position that is not in the store's functions)."""

from kvatlas.bus.stream import StreamInfo
from kvatlas.errors import KvatlasError
from kvatlas.index.protocol import Position, ResidencyIndex


async def start_position(index: ResidencyIndex, partition: int, stream: StreamInfo) -> tuple[Position, bool]:
    """The position to read after, as it is stored then; True where it is the beginning of another stream than before.

    A store without a position knows no worker: reading starts at the stream's end, and heartbeats make the workers
    doubted. Raises KvatlasError where another owner moved the position meanwhile.
    """
    stored = await index.position(partition)
    if stored is None:
        wanted, new = Position(stream.creation_us, stream.last_seq), False
    elif stored.creation_us != stream.creation_us or stored.seq > stream.last_seq:
        wanted, new = Position(stream.creation_us, max(0, stream.first_seq - 1)), True  # an empty one begins at 0
    else:
        return stored, False
    now = await index.set_position(partition, stored, wanted)
    if now is None or now.creation_us != stream.creation_us:
        raise KvatlasError("the stored position changed meanwhile")
    return now, new
