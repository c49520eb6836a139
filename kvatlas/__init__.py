"""Code that all parts of kvatlas share. It never imports `publishers`, `indexer`, `router_client` or `simulator`.

blocks/        blocks: hash chain, tiers, who holds them, how much an engine reuses (pure)
bus/           NATS: connection, event stream, subjects, messages and requests
cost/          the cost of a request on a worker, in microseconds: two profiles, learned rates
embedded/      embedded NATS and Valkey servers
fleet/         records of workers, their state and load; worker identities and tenants
index/         the residency index: one protocol, three implementations (memory, Redis, SQLite)
predictions/   predicted against reported cached tokens
reservations/  routers' bookings on a pool's workers: one protocol, two implementations (memory, Redis)
runtime/       asyncio and logging: retries, back-off, background tasks, wake-ups, certificate files, rate-limited log
settings/      one settings class per process: flags and environment variables
store/         Redis or Valkey: connections and server-side functions
telemetry/     OpenTelemetry traces and metrics

errors.py      every error, as a tree          identity.py    scopes, workers, pools, partitions, shards
events.py      engine events, index events     request.py     a request's hints and shape, a selection result
redaction.py   URLs without passwords          validation.py  bounds of numbers, errors as one line
version.py     the installed version
"""
