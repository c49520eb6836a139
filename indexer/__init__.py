"""Indexer workers: fold the stream of publishers' messages into the residency index.

    service        connects and runs one replica            status       its page: /healthz, /readyz, /status
    replica        the tasks of one replica together         counters     plain integers
    ownership      which replica should read what (pure)     membership   leases: start and stop partitions
    partition      one partition's readings, one by one      reading      the hot path from NATS into the feed
    pull           requests and the server's answers (pure)  feed         what waits between a reading and the applier
    admission      which messages may be applied (pure)      dead_letters those that may not
    applier        one shard's calls to the index            sweeper      gives memory of retired holders back
    doubt          when to ask for a snapshot (pure)         grants       how many large ones at once (pure)
    repair         asks and grants                           liveness     alive, lost, retired (pure)
    heartbeats     hears workers, writes fleet records       gauges       what an exporter samples
    starting       where a reading begins                    scrub        recounts holders, slowly
    echo           do NATS and the replica hear each other   forgetting   which closed records may go (pure)
    unused_scopes  scopes that nobody uses any more

Invariants:
- Any number of replicas may read the same partition: the fence inside the index (`kvatlas.index.protocol`) takes each
  message once. Leases only save work.
- A reading that is in any doubt is given up, and another begins from the stored position; what comes twice is a duplicate.
- A message is applied, found a duplicate, or counted with its reason and kept as a dead letter. Nothing stops a partition.
- Errors of NATS and of the store are waited out with what was read kept; calls are repeated, never skipped.
- Work here is per message and per event, never per block.
"""
