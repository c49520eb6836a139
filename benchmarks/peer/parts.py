"""The measured parts of kvatlas and its peer, by name."""

from collections.abc import Awaitable, Callable, Mapping, Sequence

from benchmarks.peer import choices, ingest, memory, overlap, start_up, visibility
from benchmarks.peer.comparison import Comparison, Subject
from kvatlas.store.connection import Store

Part = Callable[[Store, Sequence[Subject]], Awaitable[list[Comparison]]]

PARTS: Mapping[str, Part] = {
    "choices": choices.measure,
    "overlap": overlap.measure,
    "ingest": ingest.measure,
    "visibility": visibility.measure,
    "memory": memory.measure,
    "start-up": start_up.measure,
}
