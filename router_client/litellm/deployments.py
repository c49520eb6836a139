"""What LiteLLM's Router calls a deployment, in the words of kvatlas: which model, which workers, which request.

A deployment is a dictionary with `model_name`, `litellm_params` and `model_info`, as LiteLLM's model list has it.
"""

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

from kvatlas.fleet.records import FleetRecord
from router_client.learning.timings import Timings
from router_client.results import RANK_HEADER
from router_client.tokens.text_request import Api, TextRequest
from router_client.tokens.usage import Usage

Deployment = dict[str, Any]

RESERVATION = "kvatlas_reservation"
"""In a chosen deployment's `model_info`. LiteLLM hands that to its callbacks, one for each try; the tries of a request
share their metadata."""


def by_engine_model(
    deployments: Sequence[Deployment], providers: Collection[str]
) -> Mapping[str, Sequence[Deployment]]:
    """Deployments by the model that their engine is asked for: what stands behind the provider's name."""
    found: dict[str, list[Deployment]] = {}
    for deployment in deployments:
        model = deployment["litellm_params"]["model"]
        provider, _, rest = model.partition("/")
        found.setdefault(rest if rest and provider in providers else model, []).append(deployment)
    return found


def by_worker(deployments: Sequence[Deployment], records: Mapping[str, FleetRecord]) -> Mapping[str, Deployment]:
    """Deployments by the workers behind them: those at their `api_base` (with or without `/v1`), and the one that their
    `model_info.id` names. The ranks of a data-parallel engine share an address, and so a deployment."""
    at: dict[str, list[str]] = {}
    for worker_id, record in records.items():
        if record.endpoint.url:
            at.setdefault(_root(record.endpoint.url), []).append(worker_id)
    found: dict[str, Deployment] = {}
    for deployment in deployments:
        name = (deployment.get("model_info") or {}).get("id")
        address = _root(deployment["litellm_params"].get("api_base") or "")
        for id in [name] if name in records else at.get(address, ()):
            found.setdefault(str(id), deployment)
    return found


def carrying(deployment: Deployment, reservation: str, headers: Mapping[str, str]) -> Deployment:
    """The deployment as one try is to use it: its callbacks find the reservation, its engine the headers."""
    params = deployment["litellm_params"]
    if headers:
        params = {**params, "extra_headers": {**(params.get("extra_headers") or {}), **headers}}
    info = {**(deployment.get("model_info") or {}), RESERVATION: reservation}
    return {**deployment, "litellm_params": params, "model_info": info}


def put_headers(request_kwargs: dict[str, Any], headers: Mapping[str, str]) -> None:
    """Where a request brings headers of its own, LiteLLM sends those alone, so these go with them."""
    if "extra_headers" in request_kwargs:
        own = request_kwargs["extra_headers"] or {}
        request_kwargs["extra_headers"] = {**{k: v for k, v in own.items() if k != RANK_HEADER}, **headers}


def read_request(api: Api, messages: Sequence[Any], request_kwargs: Mapping[str, Any]) -> TextRequest:
    """What the engine will be asked, as far as a router reads it. LiteLLM wraps a completion's prompt in a message."""
    asked = {"messages": messages} if api is Api.CHAT else {"prompt": messages[0]["content"]}
    return TextRequest(api, {**(request_kwargs.get("extra_body") or {}), **request_kwargs, **asked})


def reservation_of(callback_kwargs: Mapping[str, Any]) -> dict[str, Any] | None:
    """The `model_info` of the try that a callback is about, where kvatlas chose its deployment."""
    info = (callback_kwargs.get("litellm_params") or {}).get("model_info")
    return info if isinstance(info, dict) and RESERVATION in info else None


def told_usage(callback_kwargs: Mapping[str, Any], response: Any) -> Usage | None:
    """What the engine said; None for a stream that was not asked for it, because LiteLLM puts an estimate there."""
    options = (callback_kwargs.get("optional_params") or {}).get("stream_options") or {}
    usage = getattr(response, "usage", None)
    if usage is None or (callback_kwargs.get("stream") and not options.get("include_usage")):
        return None
    return Usage.of({"usage": usage.model_dump()})


def told_timings(callback_kwargs: Mapping[str, Any]) -> Timings | None:
    """How long a stream's first token took; None for an answer that came whole."""
    sent, first = callback_kwargs.get("api_call_start_time"), callback_kwargs.get("completion_start_time")
    if not callback_kwargs.get("stream") or not isinstance(sent, datetime) or not isinstance(first, datetime):
        return None
    return Timings(ttft_us=(first - sent) / timedelta(microseconds=1))


def _root(url: str) -> str:
    return url.rstrip("/").removesuffix("/v1").rstrip("/")
