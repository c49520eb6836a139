"""Indexer processes fold the stream of publishers' messages into the residency index.

    membership --leases--> owned_partitions --starts--> reader
    NATS --> pull_consumer --> admission --> queue --> applier --> index (kvatlas.index)
                                   +--> dead_letters

    service               connects and runs one replica      ownership/
    replica               ties the parts together              membership         keeps the replica's leases alive
    applier               one shard's calls to the index       rendezvous         which replica should own what (pure)
    status                /healthz, /readyz, /status           echo               checks that a message gets to NATS and back
    counters, gauges      what an exporter reads               owned_partitions   the running readers
    partition/                                               repair/
      reader              reads from the stored position       repair_loop        requests snapshots of doubted workers
      pull_consumer       the hot path from NATS               doubt              which workers are in doubt (pure)
      pull_protocol       requests and statuses (pure)         grant_server       answers requests to send large snapshots
      admission           which messages are valid (pure)      grants             how many bytes are granted (pure)
      queue               between consumer and applier       cleanup/
      dead_letters        keeps the invalid ones               sweeper            frees memory of retired holders
      event_stream        creates the stream if missing        record_expiry      which closed records to delete (pure)
    liveness/                                                  scope_expiry       deletes unused scopes
      heartbeats          receives, writes fleet records
      failure_detector    alive, lost, retired (pure)

Invariants:
- Any number of replicas may read the same partition: the fence inside the index (`kvatlas.index.protocol`) takes each
  message once. Leases only save work.
- When in doubt, a consumer is dropped with its queue, and another one starts from the stored position; messages that come
  twice are duplicates.
- A message is applied, found to be a duplicate, or counted with a reason and kept as a dead letter. No message stops a
  partition.
- After an error of NATS or the store the same messages are applied again; a call is repeated, never skipped.
- Work here is per message and per event, never per block.
"""
