"""Reads objects of the pod's own namespace from Kubernetes, with the pod's service account."""

import asyncio
import logging
import os
import ssl
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import httpx
from pydantic import BaseModel, ValidationError

from kvatlas.errors import KvatlasError, SettingsError
from kvatlas.runtime.background_task import BackgroundTask
from kvatlas.validation import describe_expected

EVERY_S = 5.0
CALL_S = 5.0
SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")

_NEEDS = "reading from Kubernetes needs a pod's service account"

T = TypeVar("T", bound=BaseModel)

_log = logging.getLogger("kvatlas_router.gateway")


class KubernetesApi:
    """Gets and lists objects in the pod's namespace."""

    def __init__(self, client: httpx.AsyncClient, folder: Path = SERVICE_ACCOUNT) -> None:
        """`client` has the API's address. Raises SettingsError without a service account."""
        self._client = client
        self._token = folder / "token"
        try:
            self._namespace = (folder / "namespace").read_text().strip()
        except OSError as error:
            raise SettingsError(f"{_NEEDS}; {folder / 'namespace'}: {error.strerror}") from error

    async def get_object(self, version: str, plural: str, name: str) -> Any:
        """Get one object. `version`: group/version, or just the version for the core group. Raises KvatlasError."""
        return await self._get(version, f"{plural}/{name}", {})

    async def list_objects(self, version: str, plural: str, selector: str = "") -> Sequence[Any]:
        """The objects whose labels match, from the API server's cache. Raises KvatlasError."""
        found = await self._get(version, plural, {"resourceVersion": "0", "labelSelector": selector})
        items = found.get("items")
        return items if isinstance(items, list) else []

    async def _get(self, version: str, what: str, query: dict[str, str]) -> dict[str, Any]:
        root = "apis" if "/" in version else "api"
        path = f"/{root}/{version}/namespaces/{self._namespace}/{what}"
        try:
            token = self._token.read_text().strip()  # Kubernetes renews the token
            answer = await self._client.get(path, params=query, headers={"authorization": f"Bearer {token}"})
            answer.raise_for_status()
            found = answer.json()
        except (OSError, httpx.HTTPError, ValueError) as error:
            raise KvatlasError(f"{path}: {' '.join(str(error).split())[:200]}") from error
        if not isinstance(found, dict):
            raise KvatlasError(f"{path}: the answer is not a JSON object")
        return found


@asynccontextmanager
async def open_kubernetes_api(folder: Path = SERVICE_ACCOUNT) -> AsyncIterator[KubernetesApi]:
    """Open the API in the way that pods reach it. Raises SettingsError outside a pod."""
    host, port = os.environ.get("KUBERNETES_SERVICE_HOST"), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    if not host:
        raise SettingsError(f"{_NEEDS}; KUBERNETES_SERVICE_HOST is not set")
    try:
        trusted = ssl.create_default_context(cafile=str(folder / "ca.crt"))
    except OSError as error:
        raise SettingsError(f"{_NEEDS}; {folder / 'ca.crt'} can't be read: {error.strerror}") from error
    url = f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"
    async with httpx.AsyncClient(base_url=url, verify=trusted, timeout=CALL_S, trust_env=False) as client:
        yield KubernetesApi(client, folder)


class PeriodicRead(ABC):
    """Reads a value from the API every EVERY_S. While the API does not answer, the last value stays in use."""

    def __init__(self, what: str) -> None:
        """`what`: the value's name in the log."""
        self._what = what
        self._said: Sequence[str] = ()
        self._task = BackgroundTask(self._run, f"kvatlas {what}")

    async def start(self) -> None:
        """Read once, then in the background."""
        await self.read()
        self._task.start()

    async def stop(self) -> None:
        """Stop reading."""
        await self._task.stop()

    async def read(self) -> None:
        """Read now. Problems are logged when they change."""
        try:
            async with asyncio.timeout(CALL_S):
                said = await self._read()
        except (KvatlasError, TimeoutError) as error:
            said = [f"{self._what} could not be read ({str(error) or 'no answer'}); keeping the last value"]
        if said != self._said:
            for line in said:
                _log.warning("%s", line)
        self._said = said

    @abstractmethod
    async def _read(self) -> Sequence[str]:
        """Read the value, and return one line for each object that is left out. Raises KvatlasError."""

    async def _run(self) -> None:
        while self._task.running:
            await asyncio.sleep(EVERY_S)
            await self.read()


def parse_objects(kind: str, model: type[T], found: Iterable[Any], wrong: list[str]) -> list[T]:
    """The objects that can be read. For each of the others, a line is added to `wrong`."""
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
