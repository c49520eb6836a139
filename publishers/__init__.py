"""Engine-side publishers: what an engine's cache holds, told to the index without a loss that goes unseen.

    engine --ZMQ--> feed ---> telling -------------------> sender --JetStream-->
                    |         |- ledger   (what is held)   |
                    |         `- outbox   (what is told) --'
                    `- continuity, replay, engines/, poison, dead_letter

Pure (no I/O)
    continuity       is what the feed brings one engine process' unbroken story?   poison: whose are the bad payloads?
    engines/         an engine's bytes as engine-neutral events, one file an engine
    ledger           reference counts of what the engine holds, folded into the change of what is announced
                     (lineage, closure, announcement, twins, holding, extra_keys, ledger_dump: its parts)
    telling          ledger in, outbox out; incarnations (incarnation) and checkpoints (checkpointing)
    outbox           go-back-N of one incarnation's messages; cutting makes the messages, acknowledgement reads answers
    load             an engine's metrics page as its load
Talking (thin)
    publisher        the embeddable Publisher: sender, control, granting, heartbeat, engine_poller in one task group
    feed, replay     the engine's ZMQ sockets
    sidecar          `kvatlas publish`: feed, publisher and saved_state of one or several engine ranks

Invariants
- Nothing the engine sends stops a feed; whatever is left out is counted.
- In doubt less is announced than is held, never more.
- What was put in an incarnation, snapshot first, adds up to what the ledger announces, or a new incarnation is wanted.
- Memory towards the bus is bounded: when the outbox is full the ledger is told anew.
"""

from publishers.publisher import Publisher
from publishers.settings import PublisherSettings

__all__ = ["Publisher", "PublisherSettings"]
