"""The real request that probes a doubtful engine: it asks for one token from the model that the engine serves. A status
page would prove nothing, since nothing is computed for it."""

import logging
from collections.abc import Mapping

from kvatlas_router.progress.engine_progress import Probe
from kvatlas_router.upstream.engine_client import EngineAway, EngineClient

NOT_SERVED = (404, 405, 501)

_PATHS = (
    ("/v1/completions", {"prompt": "1"}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "1"}]}),
)
_log = logging.getLogger("kvatlas_router.proxy")


async def ask_for_a_token(client: EngineClient, url: str, model: str, headers: Mapping[str, str]) -> Probe:
    """Ask the engine for one token. There is no time limit: the caller cancels the call. `headers`: needed to reach a
    data-parallel rank."""
    for path, prompt in _PATHS:
        body = {"model": model, **prompt, "max_tokens": 1, "temperature": 0}
        try:
            answer = await client.call("POST", f"{url.rstrip('/')}{path}", body, more_headers=headers)
        except EngineAway as error:
            _log.debug("%s: probe failed (%s)", url, error)
            return Probe.FAILED
        if answer.status in NOT_SERVED:
            continue
        if 200 <= answer.status < 300:
            return Probe.FAILED if b'"choices"' not in answer.body else Probe.ANSWERED
        return Probe.UNFIT if 400 <= answer.status < 500 and answer.status != 429 else Probe.FAILED
    return Probe.UNFIT
