"""`/metrics` of our servers, in Prometheus' text format. `setup_telemetry` must be informed that a process serves this page."""

import asyncio

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from kvatlas.telemetry import read_metrics_page


async def _metrics(request: Request) -> Response:
    page, content_type = await asyncio.to_thread(read_metrics_page, request.headers.get("accept", ""))
    return Response(page, headers={"Content-Type": content_type})


METRICS_ROUTE = Route("/metrics", _metrics)
