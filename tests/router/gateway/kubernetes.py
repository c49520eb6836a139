"""A Kubernetes API with the objects of one namespace, in this process."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from kvatlas_router.gateway import service
from kvatlas_router.gateway.kubernetes_api import KubernetesApi

NAMESPACE = "models"
Object = dict[str, Any]


@dataclass(slots=True)
class Namespace:
    """`objects`: by group and version, then by plural. `status`: the status of every answer from now on."""

    folder: Path
    objects: dict[str, dict[str, list[Object]]] = field(default_factory=dict)
    status: int = 200

    @asynccontextmanager
    async def open(self) -> AsyncIterator[KubernetesApi]:
        """The API as a pod in the namespace reaches it."""
        (self.folder / "token").write_text("secret\n")
        (self.folder / "namespace").write_text(NAMESPACE)
        routes = [
            Route(f"/{root}/namespaces/{NAMESPACE}/{plural}", self._answer)
            for root in ("api/{version}", "apis/{group}/{version}")
            for plural in ("{plural}", "{plural}/{name}")
        ]
        transport = httpx.ASGITransport(app=Starlette(routes=routes))
        async with httpx.AsyncClient(transport=transport, base_url="https://kubernetes") as client:
            yield KubernetesApi(client, self.folder)

    def replace_service(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let pickers of this process find this API."""
        monkeypatch.setattr(service, "open_kubernetes_api", self.open)

    async def _answer(self, request: Request) -> Response:
        if request.headers["authorization"] != "Bearer secret" or self.status != 200:
            return JSONResponse({"kind": "Status"}, max(self.status, 403))
        at: Mapping[str, str] = request.path_params
        version = "/".join(at[part] for part in ("group", "version") if part in at)
        found = self.objects.get(version, {}).get(at["plural"], [])
        if "name" not in at:
            wanted = request.query_params["labelSelector"]
            return JSONResponse({"items": [one for one in found if _has_labels(one, wanted)]})
        named = [one for one in found if one["metadata"]["name"] == at["name"]]
        return JSONResponse(named[0]) if named else JSONResponse({"kind": "Status"}, 404)


def _has_labels(one: Object, selector: str) -> bool:
    labels = one.get("metadata", {}).get("labels", {})
    return all(labels.get(part.partition("=")[0]) == part.partition("=")[2] for part in selector.split(",") if part)


def pool_object(name: str, app: str, *ports: int) -> Object:
    """An InferencePool that selects the pods of an application."""
    spec = {"selector": {"matchLabels": {"app": app}}, "targetPorts": [{"number": port} for port in ports]}
    return {"metadata": {"name": name}, "spec": spec}


def pod_object(ip: str, app: str, *, ready: bool = True, **metadata: Any) -> Object:
    """A pod of an application."""
    conditions = [{"type": "Initialized", "status": "True"}, {"type": "Ready", "status": str(ready)}]
    named = {"name": f"{app}-{ip}", "labels": {"app": app, "zone": "a"}, **metadata}
    return {"metadata": named, "status": {"podIP": ip, "conditions": conditions}}


def namespace_of(folder: Path, pools: Sequence[Object], pods: Sequence[Object]) -> Namespace:
    return Namespace(
        folder, {"inference.networking.k8s.io/v1": {"inferencepools": list(pools)}, "v1": {"pods": list(pods)}}
    )
