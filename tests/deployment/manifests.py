"""The compose services and Kubernetes containers that run kvatlas, as commands with their settings."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
KUSTOMIZATIONS = sorted(path.parent for path in (ROOT / "k8s").rglob("kustomization.yaml"))
MANIFESTS = sorted(path for path in (ROOT / "k8s").rglob("*.yaml") if path.name != "kustomization.yaml")

FROM_POD = {
    "metadata.name": "vllm-7d9c5b6f4-x2x7k",
    "spec.nodeName": "node-1.example",
    "status.podIP": "10.1.2.3",
}
"""Examples of pod fields."""


@dataclass(frozen=True, slots=True)
class Deployed:
    """One container that runs kvatlas. `variables`: the environment as its process will see it."""

    where: str
    words: list[str]
    variables: dict[str, str] = field(default_factory=dict)
    ports: dict[str, int] = field(default_factory=dict)
    probes: list[dict[str, Any]] = field(default_factory=list)

    def __str__(self) -> str:
        return self.where


def documents(path: Path) -> list[dict[str, Any]]:
    """Every document of a YAML file. Raises for duplicate anchors and bad syntax."""
    return [one for one in yaml.safe_load_all(path.read_text()) if one is not None]


def compose() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    return loaded


def deployed_containers() -> list[Deployed]:
    """Every container that runs kvatlas, in compose and in Kubernetes."""
    return [*_compose_containers(), *_pod_containers()]


def _compose_containers() -> Iterator[Deployed]:
    for name, service in compose()["services"].items():
        if str(service.get("image", "")).startswith("kvatlas"):
            yield Deployed(f"compose {name}", service["command"], dict(service.get("environment", {})))


def _pod_containers() -> Iterator[Deployed]:
    maps = {
        one["metadata"]["name"]: one["data"]
        for path in MANIFESTS
        for one in documents(path)
        if one["kind"] == "ConfigMap"
    }
    for path in MANIFESTS:
        for one in documents(path):
            pod = one.get("spec", {}).get("template", {}).get("spec", {})
            for container in (*pod.get("initContainers", ()), *pod.get("containers", ())):
                if container["image"].partition(":")[0] == "kvatlas":
                    yield Deployed(
                        f"{path.name} {container['name']}",
                        container["args"],
                        _variables(container, maps),
                        {port["name"]: port["containerPort"] for port in container.get("ports", ())},
                        [probe for key, probe in container.items() if key.endswith("Probe")],
                    )


def _variables(container: dict[str, Any], maps: dict[str, dict[str, str]]) -> dict[str, str]:
    found: dict[str, str] = {}
    for source in container.get("envFrom", ()):
        found.update(maps[source["configMapRef"]["name"]])
    for entry in container.get("env", ()):
        if "value" in entry:
            value = entry["value"]
            for name, known in found.items():
                value = value.replace(f"$({name})", known)
        else:
            value = FROM_POD[entry["valueFrom"]["fieldRef"]["fieldPath"]]
        found[entry["name"]] = value
    return found
