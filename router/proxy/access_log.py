"""The access log: one line for each request, with the decision."""

import logging
import time

from kvatlas_router.proxy.client_request import ClientRequest

_log = logging.getLogger("router_client.access")


def log_access(request: ClientRequest, *, gone: bool) -> None:
    """`POST /v1/completions 200, first byte 12.3 ms, 250.1 ms, 4096 bytes; model m; "w1";cached=512;...`"""
    if not _log.isEnabledFor(logging.INFO):
        return
    now = time.perf_counter_ns()
    first = request.first_byte_ns
    _log.info(
        "%s %s %s, %s, %.1f ms, %d bytes; model %s; %s",
        request.for_engine.method,
        request.for_engine.path,
        "client gone" if gone else request.status,
        "no answer" if first is None else f"first byte {(first - request.began_ns) / 1e6:.1f} ms",
        (now - request.began_ns) / 1e6,
        request.sent_bytes,
        request.model,
        request.decision or "no worker",
    )
