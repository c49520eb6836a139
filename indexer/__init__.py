"""Indexer replicas: fold the stream of publishers' messages into the residency index.

    membership --leases--> owned_partitions --starts--> reader
    NATS --> pull_consumer --> admission --> queue --> applier --> index (kvatlas.index)
                                   +--> dead_letters

    service               connects and runs one replica      ownership/
    replica               ties the parts together              membership         keeps the replica's leases alive
    applier               one shard's calls to the index       rendezvous         which replica should own what (pure)
    status                /healthz, /readyz, /status           echo               does a message get to NATS and back?
    counters, gauges      what an exporter reads               owned_partitions   the running readers
    partition/                                               repair/
      reader              reads from the stored position       repair_loop        requests snapshots of doubted workers
      pull_consumer       the hot path from NATS               doubt              which workers are doubted (pure)
      pull_protocol       requests and statuses (pure)         grant_server       answers requests to send large snapshots
      admission           which messages are valid (pure)      grants             how many bytes are granted (pure)
      queue               between consumer and applier       cleanup/
      dead_letters        keeps the invalid ones               scrubber           recounts holders, slowly
      event_stream        makes the stream if it is gone       sweeper            frees memory of retired holders
    liveness/                                                  record_expiry      which closed records may go (pure)
      heartbeats          receives, writes fleet records       scope_expiry       deletes unused scopes
      failure_detector    alive, lost, retired (pure)

Invariants:
- Any number of replicas may read the same partition: the fence inside the index (`kvatlas.index.protocol`) takes each
  message once. Leases only save work.
- A consumer in any doubt is dropped with its queue, and another starts from the stored position; messages that come twice
  are duplicates.
- A message is applied, found a duplicate, or counted with its reason and kept as a dead letter. No message stops a partition.
- After an error of NATS or of the store the same messages are applied again; a call is repeated, never skipped.
- Work here is per message and per event, never per block.
"""
