"""What the extension's objects say of requests: InferenceObjective their priority, InferenceModelRewrite another model.

Version v1alpha2, of the group `inference.networking.x-k8s.io` (Inference Extension) or `llm-d.ai` (llm-d-router 0.9).
"""

import asyncio
import logging
import os
import random
import ssl
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeVar

import httpx
from pydantic import BaseModel, Field, ValidationError

from kvatlas.errors import KvatlasError, SettingsError
from kvatlas.runtime.background_task import BackgroundTask
from kvatlas.validation import describe_expected

EVERY_S = 5.0
CALL_S = 5.0
OBJECTIVE_HEADERS = (b"x-gateway-inference-objective", b"x-llm-d-inference-objective")
SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")

T = TypeVar("T", bound=BaseModel)

_log = logging.getLogger("router_client.gateway")


class _Metadata(BaseModel):
    name: str
    creationTimestamp: str = ""  # noqa: N815 - Kubernetes' name


class _PoolRef(BaseModel):
    name: str


class _ObjectiveSpec(BaseModel):
    priority: Annotated[int, Field(ge=-(1 << 31), lt=1 << 31)] | None = None
    poolRef: _PoolRef  # noqa: N815


class _Objective(BaseModel):
    metadata: _Metadata
    spec: _ObjectiveSpec


class _ModelMatch(BaseModel):
    value: Annotated[str, Field(min_length=1)]


class _Match(BaseModel):
    model: _ModelMatch


class _Target(BaseModel):
    weight: Annotated[int, Field(ge=1, le=1_000_000)] = 1
    modelRewrite: Annotated[str, Field(min_length=1)]  # noqa: N815


class _Rule(BaseModel):
    matches: list[_Match] = []
    targets: list[_Target] = []


class _RewriteSpec(BaseModel):
    poolRef: _PoolRef  # noqa: N815
    rules: list[_Rule]


class _Rewrite(BaseModel):
    metadata: _Metadata
    spec: _RewriteSpec


Targets = Sequence[tuple[str, int]]
"""Models with their weights."""


@dataclass(frozen=True, slots=True)
class PoolObjects:
    """`priorities`: by objective's name, higher is more important. `rewrites`: targets by the model that a request names;
    `rewrites_any`: those of requests for any other model."""

    priorities: Mapping[str, int] = field(default_factory=dict)
    rewrites: Mapping[str, Targets] = field(default_factory=dict)
    rewrites_any: Targets = ()

    @classmethod
    def of(cls, pool: str, objectives: Iterable[Any], rewrites: Iterable[Any]) -> tuple["PoolObjects", Sequence[str]]:
        """From the objects of a namespace, and a line for each that can't be read: it is left out.

        An exact match goes before a rule for all models, then the older object, then the earlier rule.
        """
        wrong: list[str] = []
        priorities = {
            one.metadata.name: one.spec.priority or 0
            for one in _parse("InferenceObjective", _Objective, objectives, wrong)
            if one.spec.poolRef.name == pool
        }
        exact: dict[str, Targets] = {}
        for_any: Targets = ()
        found = [
            one for one in _parse("InferenceModelRewrite", _Rewrite, rewrites, wrong) if one.spec.poolRef.name == pool
        ]
        for one in sorted(found, key=lambda each: (each.metadata.creationTimestamp, each.metadata.name)):
            for rule in one.spec.rules:
                targets = [(target.modelRewrite, target.weight) for target in rule.targets]
                for match in rule.matches:
                    exact.setdefault(match.model.value, targets)
                if not rule.matches:
                    for_any = for_any or targets
        return cls(priorities, exact, for_any), wrong

    def rewrite(self, model: str) -> str:
        """The model that the engine is asked for; with several targets it is drawn by their weights."""
        targets = self.rewrites.get(model, self.rewrites_any)
        if not targets:
            return model
        return random.choices([name for name, _ in targets], [weight for _, weight in targets])[0]


def _parse(kind: str, model: type[T], found: Iterable[Any], wrong: list[str]) -> list[T]:
    read: list[T] = []
    for one in found:
        try:
            read.append(model.model_validate(one))
        except ValidationError as error:
            first = error.errors()[0]
            at = ".".join(map(str, first["loc"]))
            metadata = one.get("metadata") if isinstance(one, dict) else None
            name = metadata.get("name") if isinstance(metadata, dict) else one
            wrong.append(f"{kind} {name!r:.80} is left out: {at}: {describe_expected(first)}")
    return read


class KubernetesApi:
    """Lists objects in the pod's own namespace, as the pod's service account may."""

    def __init__(self, client: httpx.AsyncClient, folder: Path = SERVICE_ACCOUNT) -> None:
        """`client` has the API's address. Raises SettingsError without a service account."""
        self._client = client
        self._token = folder / "token"
        try:
            self._namespace = (folder / "namespace").read_text().strip()
        except OSError as error:
            raise SettingsError(
                f"--extension-objects needs a pod's service account; {folder / 'namespace'}: {error.strerror}"
            ) from error

    async def list_objects(self, group: str, plural: str) -> Sequence[Any]:
        """Raises KvatlasError."""
        path = f"/apis/{group}/v1alpha2/namespaces/{self._namespace}/{plural}"
        try:
            token = self._token.read_text().strip()  # it is renewed
            answer = await self._client.get(path, headers={"authorization": f"Bearer {token}"})
            answer.raise_for_status()
            items = answer.json()["items"]
        except (OSError, httpx.HTTPError, ValueError, KeyError, TypeError) as error:
            raise KvatlasError(f"{path}: {' '.join(str(error).split())[:200]}") from error
        return items if isinstance(items, list) else []


@asynccontextmanager
async def open_kubernetes_api(folder: Path = SERVICE_ACCOUNT) -> AsyncIterator[KubernetesApi]:
    """As a pod reaches it. Raises SettingsError outside a pod."""
    host, port = os.environ.get("KUBERNETES_SERVICE_HOST"), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    if not host:
        raise SettingsError("--extension-objects needs a pod: KUBERNETES_SERVICE_HOST is not set")
    try:
        trusted = ssl.create_default_context(cafile=str(folder / "ca.crt"))
    except OSError as error:
        raise SettingsError(f"--extension-objects: {folder / 'ca.crt'} can't be read: {error.strerror}") from error
    url = f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"
    async with httpx.AsyncClient(base_url=url, verify=trusted, timeout=CALL_S, trust_env=False) as client:
        yield KubernetesApi(client, folder)


class ExtensionObjects:
    """A pool's objects, read again every EVERY_S; the last ones stay while the API does not answer."""

    def __init__(self, api: KubernetesApi | None, group: str, pool: str) -> None:
        """`api` None: there are none."""
        self.current = PoolObjects()
        self._api = api
        self._group = group
        self._pool = pool
        self._said: Sequence[str] = ()
        self._task = BackgroundTask(self._run, "kvatlas extension objects")

    async def start(self) -> None:
        """Read once, then in the background."""
        if self._api is not None:
            await self.read()
            self._task.start()

    async def stop(self) -> None:
        await self._task.stop()

    async def read(self) -> None:
        """Read them now. What is wrong is logged when it changes."""
        assert self._api is not None
        try:
            async with asyncio.timeout(CALL_S):
                objectives = await self._api.list_objects(self._group, "inferenceobjectives")
                rewrites = await self._api.list_objects(self._group, "inferencemodelrewrites")
        except (KvatlasError, TimeoutError) as error:
            said: Sequence[str] = [f"extension's objects not read ({error or 'no answer'}); keeping the last ones"]
        else:
            self.current, said = PoolObjects.of(self._pool, objectives, rewrites)
        if said != self._said:
            for line in said:
                _log.warning("%s", line)
        self._said = said

    async def _run(self) -> None:
        while self._task.running:
            await asyncio.sleep(EVERY_S)
            await self.read()
