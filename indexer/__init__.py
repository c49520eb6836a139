"""Indexer processes apply the stream of publishers' messages to the residency index.

    membership --leases--> owned_partitions --starts--> reader
    NATS --> pull_consumer --> admission --> queue --> applier --> index (kvatlas.index)
                                   +--> dead_letters

Invariants:
- Any number of replicas may read the same partition: the fence inside the index (`kvatlas.index.protocol`) applies each message
  only once. Leases merely avoid duplicate work.
- When in doubt, a consumer is dropped with its queue, and a new one starts from the stored position; messages that arrive twice
  are dropped as duplicates.
- A message is applied, found to be a duplicate, or counted with a reason and kept as a dead letter. No message stops a
  partition.
- After an error from NATS or the store, the same messages are applied again; calls are repeated, never skipped.
- The work done here is per message and per event, never per block.
"""
