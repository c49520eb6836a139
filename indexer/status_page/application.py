"""The status page: `/` is for people; `/healthz`, `/readyz`, `/status` (JSON) and `/metrics` (Prometheus) are for probes and
scripts; `/blocks` answers queries about single blocks."""

from dataclasses import asdict
from typing import Any

from nats.aio.client import Client
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from kvatlas.block_lookup.lookup import BlockLookup
from kvatlas.fleet_store.fleet_store import FleetStore
from kvatlas.index.protocol import ResidencyIndex
from kvatlas.runtime.certificate_files import certificates_in_use
from kvatlas.telemetry.metrics_page import METRICS_ROUTE
from kvatlas_indexer.indexer_process import Replica
from kvatlas_indexer.status_page.blocks import block_routes
from kvatlas_indexer.status_page.sections import status_page


def application(replica: Replica, index: ResidencyIndex, fleet: FleetStore, calls: Client) -> Starlette:
    """`index`, `fleet`: what the replica writes to; `calls`: a NATS client for requests to publishers."""

    async def healthz(_: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def readyz(_: Request) -> Response:
        if replica.ready:
            return PlainTextResponse("ready\n")
        return PlainTextResponse("not ready: NATS or the store does not answer\n", status_code=503)

    async def status(_: Request) -> Response:
        return JSONResponse(status_of(replica))

    return Starlette(
        routes=[
            *status_page(replica, index, fleet).routes,
            Route("/healthz", healthz),
            Route("/readyz", readyz),
            Route("/status", status),
            METRICS_ROUTE,
            *block_routes(BlockLookup(index, fleet, calls)),
        ]
    )


def status_of(replica: Replica) -> dict[str, Any]:
    """The answer to `/status`."""
    workers = replica.workers
    return {
        "member_id": replica.member_id,
        "ready": replica.ready,
        "members": replica.membership.members,
        "partitions": [asdict(partition) for partition in replica.partitions],
        "workers": {worker_id: liveness.value for worker_id, liveness in sorted(workers.items())},
        "workers_in_doubt": {worker_id: doubt.value for worker_id, doubt in sorted(replica.doubts.items())},
        "workers_without_room": replica.workers_without_room,
        "shards_out_of_memory": replica.shards_out_of_memory,
        "shards_evicting": replica.shards_evicting,
        "retired_holders": replica.retired_holders,
        "granted_snapshot_bytes": replica.granted_bytes,
        "counters": replica.counters.to_jsonable(),
        "certificates": certificates_in_use(),
    }
