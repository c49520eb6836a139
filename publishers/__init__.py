"""Engine-side publishers: they publish what an engine's cache holds, without a loss that goes unseen.

    engine --ZMQ--> feed/subscriber --> publisher --> stream/changelog --------------> stream/sender --JetStream-->
                    |                                 |- ledger/        (held)         |
                    |- continuity, connection_state   `- stream/outbox  (published) ---'
                    `- replay, undecodable, engines/

Pure (no I/O)
    feed/            connection_state, continuity: gaps and restarts of the feed; undecodable: bad payloads
    engines/         vllm, sglang: an engine's bytes as engine-neutral events; metrics: its metrics page as its load
    ledger/          what the engine holds, and the change of it that is announced (its flow: `ledger/ledger.py`)
    stream/          changelog: ledger in, outbox out; incarnation, checkpoints; outbox: go-back-N over the messages
                     that message_split makes; puback: JetStream's answers
Talking (thin)
    publisher        the embeddable Publisher: sender, control, heartbeat, duplicate_publisher, engines/poller in one task
                     group, stream/grants
    feed/            subscriber, replay: the engine's ZMQ sockets; dead_letters: a file
    sidecar          `kvatlas publish`: feed, publisher and saved_state of one or several engine ranks; eventless_engine:
                     engines without KV events
    engines/         discovery: what a running engine offers

Invariants
- Nothing an engine sends stops its feed; whatever is left out is counted.
- In doubt less is announced than is held, never more.
- What was put in an incarnation, snapshot first, adds up to what the ledger announces, or a new incarnation is due.
- Memory towards the bus is bounded: after an overflow of the outbox a new incarnation begins with a snapshot.
"""

from publishers.publisher import Publisher
from publishers.settings import PublisherSettings

__all__ = ["Publisher", "PublisherSettings"]
