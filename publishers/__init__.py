"""Engine-side publishers: they publish the blocks in an engine's cache, and notice every lost event.

    engine --ZMQ--> feed/subscriber --> publisher --> stream/changelog --------------> stream/sender --JetStream-->
                    |                                 |- ledger/        (held)         |
                    |- continuity, connection_state   `- stream/outbox  (published) ---'
                    `- replay, undecodable, engines/

Pure (no I/O)
    feed/            connection_state, continuity: gaps and restarts of the feed; undecodable: bad payloads
    engines/         vllm, sglang, open_events: an engine's bytes as engine-neutral events; metrics: its metrics page as
                     its load
    ledger/          the blocks that the engine holds, and the changes that are published (flow: `ledger/ledger.py`)
    shared_store/    writes, notice, receiver: an engine's events of a shared store as events of the store's ledger
    stream/          changelog: ledger in, outbox out; incarnation, checkpoints; outbox: go-back-N over the messages
                     that message_split makes; puback: JetStream's answers
With I/O (thin)
    publisher        the embeddable Publisher: sender, control, heartbeat, duplicate_publisher, engines/poller in one task
                     group, stream/grants
    feed/            subscriber, replay: the engine's ZMQ sockets; dead_letters: a file
    feed/            open_batches: batches of the open event forms, from any receiver
    sidecar          `kvatlas publish`: feed, publisher and saved_state of one or several engine ranks
    sources/         engines that are not followed over ZMQ: drained_engine (TensorRT-LLM), eventless_engine, open_engine
    engines/         discovery: what a running engine offers
    shared_store/    notifier: reports an engine's writes to a shared store's publisher; process: that publisher

Invariants
- Nothing an engine sends stops its feed; everything left out is counted.
- In doubt fewer blocks are published than are held, never more.
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
