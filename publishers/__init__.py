"""Engine-side publishers: they publish which blocks an engine's cache holds, and detect every lost event.

    engine --ZMQ--> feed/subscriber --> publisher --> stream/changelog --------------> stream/sender --JetStream-->
                    |                                 |- ledger/        (held)         |
                    |- continuity, connection_state   `- stream/outbox  (published) ---'
                    `- replay, undecodable, engines/

Invariants
- Nothing that an engine sends can stop its feed; everything that is left out is counted.
- When in doubt, fewer blocks are published than are held, never more.
- The messages of an incarnation, snapshot first, add up to the ledger's published blocks, or a new incarnation is due.
- Memory for unsent messages is bounded: after an outbox overflow a new incarnation starts with a snapshot.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvatlas_publishers.feed.open_batches import OpenBatches
    from kvatlas_publishers.publisher import Publisher
    from kvatlas_publishers.settings import PublisherSettings

__all__ = ["OpenBatches", "Publisher", "PublisherSettings"]

_MODULES = {"OpenBatches": "feed.open_batches", "Publisher": "publisher", "PublisherSettings": "settings"}


def __getattr__(name: str) -> Any:
    """Import a public name on first use: programs that need one part (a simulated engine's sockets) start without nats-py."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
