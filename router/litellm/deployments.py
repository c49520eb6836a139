"""Translates LiteLLM's deployments and callbacks into kvatlas's terms: model, workers, request, usage and timings.

A deployment is a dictionary with `model_name`, `litellm_params` and `model_info`, as in LiteLLM's model list.
"""

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

from kvatlas.fleet.records import FleetRecord
from kvatlas_router.tokens.text_request import Api, TextRequest
from router_client.learning.timings import Timings
from router_client.learning.token_counts import Usage
from router_client.results import RANK_HEADER

Deployment = dict[str, Any]

RESERVATION = "kvatlas_reservation"
"""Key in a chosen deployment's `model_info`, which LiteLLM passes to its callbacks for each attempt. All attempts of a request
share its metadata."""


def by_engine_model(
    deployments: Sequence[Deployment], providers: Collection[str]
) -> Mapping[str, Sequence[Deployment]]:
    """Deployments by the engine's model, which is the name without the provider's prefix."""
    found: dict[str, list[Deployment]] = {}
    for deployment in deployments:
        model = deployment["litellm_params"]["model"]
        provider, _, rest = model.partition("/")
        found.setdefault(rest if rest and provider in providers else model, []).append(deployment)
    return found


def by_worker(deployments: Sequence[Deployment], records: Mapping[str, FleetRecord]) -> Mapping[str, Deployment]:
    """Deployments by their workers: the worker that `model_info.id` names, or those at `api_base` (with or without `/v1`).
    The ranks of a data-parallel engine share an address, and therefore a deployment."""
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


def with_reservation(deployment: Deployment, reservation: str, headers: Mapping[str, str]) -> Deployment:
    """A copy of the deployment for one attempt, with the reservation for its callbacks and the headers for its engine."""
    params = deployment["litellm_params"]
    if headers:
        params = {**params, "extra_headers": {**(params.get("extra_headers") or {}), **headers}}
    info = {**(deployment.get("model_info") or {}), RESERVATION: reservation}
    return {**deployment, "litellm_params": params, "model_info": info}


def add_headers(request_kwargs: dict[str, Any], headers: Mapping[str, str]) -> None:
    """Add headers to a request's own headers, if it has any, since LiteLLM then sends no others."""
    if "extra_headers" in request_kwargs:
        own = request_kwargs["extra_headers"] or {}
        request_kwargs["extra_headers"] = {**{k: v for k, v in own.items() if k != RANK_HEADER}, **headers}


def read_request(api: Api, messages: Sequence[Any], request_kwargs: Mapping[str, Any]) -> TextRequest:
    """The engine's request, as far as a router needs it. LiteLLM wraps a completion's prompt in a message."""
    content = {"messages": messages} if api is Api.CHAT else {"prompt": messages[0]["content"]}
    return TextRequest(api, {**(request_kwargs.get("extra_body") or {}), **request_kwargs, **content})


def reservation_of(callback_kwargs: Mapping[str, Any]) -> dict[str, Any] | None:
    """The `model_info` of the attempt that a callback reports; None if kvatlas did not choose its deployment."""
    info = (callback_kwargs.get("litellm_params") or {}).get("model_info")
    return info if isinstance(info, dict) and RESERVATION in info else None


def engine_usage(callback_kwargs: Mapping[str, Any], response: Any) -> Usage | None:
    """The engine's usage; None for a stream without `include_usage`, for which LiteLLM only estimates the usage."""
    options = (callback_kwargs.get("optional_params") or {}).get("stream_options") or {}
    usage = getattr(response, "usage", None)
    if usage is None or (callback_kwargs.get("stream") and not options.get("include_usage")):
        return None
    return Usage.of({"usage": usage.model_dump()})


def stream_timings(callback_kwargs: Mapping[str, Any]) -> Timings | None:
    """The time to a stream's first token; None for an answer that is not streamed."""
    sent, first = callback_kwargs.get("api_call_start_time"), callback_kwargs.get("completion_start_time")
    if not callback_kwargs.get("stream") or not isinstance(sent, datetime) or not isinstance(first, datetime):
        return None
    return Timings(ttft_us=(first - sent) / timedelta(microseconds=1))


def _root(url: str) -> str:
    return url.rstrip("/").removesuffix("/v1").rstrip("/")
