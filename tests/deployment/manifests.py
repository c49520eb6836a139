"""Reads the deployed compose services and Kubernetes containers that run kvatlas, as commands with their settings."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from tests.deployment.secrets import secrets
from tests.deployment.tools import ROOT, kustomized

OVERLAYS = [ROOT / "k8s" / name for name in ("base", "development")]
KSERVE = ROOT / "k8s/engines/kserve"
"""KServe's controller makes the pods."""
ENGINES = sorted(
    path.parent
    for path in (ROOT / "k8s/engines").rglob("kustomization.yaml")
    if path.parent.name != "sidecar" and path.parent != KSERVE
)
GATEWAYS = sorted(path.parent for path in (ROOT / "k8s/gateway").rglob("kustomization.yaml"))
KUSTOMIZATIONS = [*OVERLAYS, *ENGINES, KSERVE, *GATEWAYS]
"""All kustomizations that can be applied; the others are parts of them."""

Object = Mapping[str, Any]

FROM_POD = {
    "metadata.name": "llama-3.1-8b-7d9c5b6f4-x2x7k",
    "metadata.namespace": "kvatlas",
    "spec.nodeName": "node-1.example",
    "status.podIP": "10.1.2.3",
}
"""Possible values of a pod's fields."""


@dataclass(frozen=True, slots=True)
class Deployed:
    """One container that runs kvatlas. `words` and `variables`: as its process will see them."""

    where: str
    words: list[str]
    variables: dict[str, str] = field(default_factory=dict)
    ports: dict[str, int] = field(default_factory=dict)
    probes: list[dict[str, Any]] = field(default_factory=list)
    pod: Object = field(default_factory=dict)

    def __str__(self) -> str:
        return self.where


def name_of(folder: Path) -> str:
    return str(folder.relative_to(ROOT))


def label_of(one: Object) -> str:
    return f"{one['kind']} {one['metadata']['name']}"


@cache
def compose() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    return loaded


COMPOSE = ROOT / "compose"
PLACES = [COMPOSE, *KUSTOMIZATIONS]


@cache
def deployed_in(place: Path) -> Sequence[Deployed]:
    """Every container of ours, from compose or a kustomization."""
    return list(_composed() if place == COMPOSE else _in_pods(place))


def deployed() -> Sequence[Deployed]:
    return [one for place in PLACES for one in deployed_in(place)]


def pods(found: Sequence[Object]) -> Iterator[tuple[Object, Object]]:
    """Each workload with the pod that it makes."""
    for one in found:
        if "template" in one.get("spec", {}):
            yield one, one["spec"]["template"]["spec"]


def containers(pod: Object) -> list[Object]:
    return [*pod.get("initContainers", ()), *pod["containers"]]


def is_ours(container: Object) -> bool:
    return re.match(r"kvatlas(-sidecar|-simulator)?:", container["image"]) is not None


def _composed() -> Iterator[Deployed]:
    for name, service in compose()["services"].items():
        if is_ours(service):
            yield Deployed(
                f"compose {name}", service["command"], {k: str(v) for k, v in service.get("environment", {}).items()}
            )


def _in_pods(folder: Path) -> Iterator[Deployed]:
    found = kustomized(folder)
    known = {one["metadata"]["name"]: one.get("stringData", one.get("data")) for one in secrets_and_maps(found)}
    known = {"kvatlas-telemetry": known.get("kvatlas-telemetry", {}), **secrets(), **known}
    for one, pod in pods(found):
        for container in containers(pod):
            if is_ours(container) and "command" not in container:
                variables = _variables(container, known)
                yield Deployed(
                    f"{name_of(folder)} {one['metadata']['name']} {container['name']}",
                    [_expanded(word, variables) for word in container["args"]],
                    variables,
                    {port["name"]: port["containerPort"] for port in container.get("ports", ())},
                    [probe for key, probe in container.items() if key.endswith("Probe")],
                    pod,
                )


def secrets_and_maps(found: Sequence[Object]) -> list[Object]:
    return [one for one in found if one["kind"] in ("Secret", "ConfigMap")]


def _variables(container: Object, known: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    variables: dict[str, str] = {}
    for source in container.get("envFrom", ()):
        reference = source.get("configMapRef") or source["secretRef"]
        variables.update(known[reference["name"]])
    for entry in container.get("env", ()):
        if "value" in entry:
            variables[entry["name"]] = _expanded(entry["value"], variables)
        else:
            variables[entry["name"]] = FROM_POD[entry["valueFrom"]["fieldRef"]["fieldPath"]]
    return variables


def _expanded(text: str, variables: Mapping[str, str]) -> str:
    """Expand $(NAME) of earlier variables, as the kubelet does."""
    return re.sub(r"\$\((\w+)\)", lambda found: variables[found[1]], text)
