"""A request as the picker reads it: its call, plus its priority and model rewrite from the extension's objects."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from kvatlas.errors import InvalidValue
from kvatlas_router.engine_objects.object_use import ObjectUse
from kvatlas_router.gateway.extension_objects import OBJECTIVE_HEADERS, PoolObjects
from kvatlas_router.gateway.field_metrics import RequestLabels
from kvatlas_router.gateway.picker import Renaming, RequestHead
from kvatlas_router.gateway.sender import SenderTrust
from kvatlas_router.proxy.engine_call import INFERENCE, EngineCall, is_ambiguous, read_call, read_type
from kvatlas_router.proxy.json_body import UnreadableBody
from kvatlas_router.tenancy.caller import ANYBODY, Caller
from kvatlas_router.tokens.text_request import parse_object
from router_client.pricing.transfer_protocol import NotForClients, replace_fields

_ADMINISTRATION = re.compile(
    r"/(?:v1/)?(?:(?:un)?load_lora_adapter|(?:un)?load_lora_adapter_from_tensors|sleep|wake_up|is_.*|collective_rpc|abort.*|"
    r"reset_.*|flush_.*|clear_.*|start_.*|stop_.*|scale_.*|update_.*|init_.*|destroy_.*|get_.*|set_.*|release_.*|"
    r"resume.*|pause.*|continue_.*|slow_down|freeze_gc|configure_logging|server_info|kv_.*|internal.*|docs|redoc|"
    r"openapi.json|metrics|ping|load|dump.*|open_session|close_session|.*external_corp.*|hicache.*|shutdown.*|finish_.*|"
    r"begin_.*|end_.*|weights?_.*|fault_tolerance|register_.*|send_.*|pd_role_switch|.*transfer_engine_info)(?:/.*)?"
)
"""Administrative paths of engines, which are never passed on, whatever routes a gateway has."""
_MAY_BE_JSON = re.compile(rb"[ \t\r\n\x00\xef\xbb\xbf\xff\xfe]*[{\[]")
"""Matches a JSON object or list, after white space and byte order marks, that an engine might read whatever the content
type."""


class AdministrationPath(InvalidValue):
    """The path is meant for the engines' operators."""


@dataclass(frozen=True, slots=True)
class AskedRequest:
    """`changed`: the body for the engine, if it differs from the client's. `renaming`: set if that body names another model.
    `priority`: that of its objective, in the queue's order, in which lower values come first; None: no objective. `caller`:
    the sender named by the gateway."""

    head: RequestHead
    call: EngineCall
    changed: bytes | None
    labels: RequestLabels
    renaming: Renaming | None = None
    priority: int | None = None
    caller: Caller = ANYBODY

    @property
    def objects(self) -> ObjectUse | None:
        """The objects, kept by engines, that the request names or creates."""
        text = self.call.text
        return ObjectUse.of(self.head.method, self.head.path, self.call.body, None if text is None else text.body)

    @classmethod
    async def read(
        cls,
        head: RequestHead,
        body: bytes | None,
        objects: PoolObjects,
        trust: SenderTrust,
        *,
        fairness_header: str = "",
        salts: bool = False,
    ) -> Self:
        """`body=None`: the body was not waited for. `trust`: the headers and metadata that the gateway sets itself.
        `salts`: each tenant's requests get their own cache salt.

        Raises AdministrationPath, SenderUnknown, or InvalidValue for a body that engines must not get.
        """
        caller = trust.caller(head)
        call = await _read_call(head, body, of_tenant=caller.is_proven)
        model = _model_of(call)
        renaming = None
        if (
            model
            and body
            and (target := objects.rewrite(model)) != model
            and (renamed := _rename(call.body, target)) is not None
        ):
            renaming = Renaming(target, model)
            call = await _read_call(head, renamed, of_tenant=caller.is_proven)
        if salts and caller.is_proven and body:
            call = call.salted(head.path, caller.salted)
        objective = next((name for one in OBJECTIVE_HEADERS if (name := trust.header(head, one)) is not None), None)
        importance = 0 if objective is None else objects.priorities.get(objective, 0)
        tenant = caller.tenant_id or (trust.header(head, fairness_header.encode()) if fairness_header else None) or ""
        labels = RequestLabels(model, _model_of(call), tenant, importance)
        changed = call.body if body is not None and call.body != body else None
        priority = None if objective is None else -importance
        return cls(head, call, changed, labels, renaming, priority, caller)


async def _read_call(head: RequestHead, body: bytes | None, *, of_tenant: bool) -> EngineCall:
    """Read the call. On a path that is not for inference, a body that no engine would read as JSON passes unchanged, unless it
    is compressed."""
    if _ADMINISTRATION.fullmatch(head.path) or is_ambiguous(head.path):
        raise AdministrationPath(f"{head.path[:200]} is not passed on to engines")
    kind = read_type(head.headers)
    try:
        return await read_call(head.method, head.path, head.query, kind, body or b"", of_tenant=of_tenant)
    except UnreadableBody:
        if body and (head.path in INFERENCE or _MAY_BE_JSON.match(body)):
            raise
        return EngineCall(None, body or b"", len(body or b""))
    except NotForClients:
        raise
    except InvalidValue:  # no valid prompt: the engine's error goes to the client
        return await read_call(head.method, "", head.query, kind, body or b"", of_tenant=of_tenant)


def _model_of(call: EngineCall) -> str:
    return call.model or (call.text.model if call.text is not None else None) or ""


def _rename(body: bytes, target: str) -> bytes | None:
    """The JSON body with the model replaced; None if it is not a JSON object."""
    try:
        asked: Mapping[str, Any] = parse_object(body)
    except InvalidValue:
        return None
    return replace_fields(asked, body, {"model": target})
