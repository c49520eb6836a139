"""Renders the chart as users do: with values files, flags, and every pair of its switches."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from tests.deployment.tools import ROOT, objects, run

CHART = ROOT / "k8s/chart"
SIZES = ("4", "40", "400")


def production(size: str = "40") -> list[str]:
    """The flags of docs/kubernetes.md for a fleet of this many engines."""
    files = ("values-production.yaml", f"values-{size}-engines.yaml")
    return [word for file in files for word in ("--values", str(CHART / file))]


PRODUCTION = production()
EVERYTHING = "gateway.enabled=true,gateway.route=istio,gateway.kubernetesPool=true,monitoring.enabled=true"
EVERYTHING += ",monitoring.rules.enabled=true,monitoring.dashboards.enabled=true,networkPolicies.enabled=true"
EVERYTHING += ",autoscaling.enabled=true,priorityClasses.enabled=true,certificates.enabled=true"
EVERYTHING += ",collector.enabled=true,router.ingress.enabled=true,workloads.serviceAccount.create=true"
MATRIX = [
    "gateway.enabled=true",
    "autoscaling.enabled=true",
    "autoscaling.by=hpa",
    "networkPolicies.enabled=true,networkPolicies.egress.enabled=true",
    "monitoring.enabled=true,monitoring.rules.enabled=true",
    "nats.mode=none,valkey.mode=none,secrets.create=false",
    "certificates.enabled=true,tls.nats.clientCertificates=true",
    "workloads.serviceAccount.create=true,router.tls.secret=web",
    "collector.enabled=true",
]


def matrix() -> list[list[str]]:
    """Every pair of the matrix's switches, and all of them together."""
    pairs = [list(pair) for pair in itertools.combinations(MATRIX, 2)]
    return [["--set", ",".join(chosen)] for chosen in [*pairs, MATRIX]]


OWN_LABELS = {
    "app.kubernetes.io/managed-by",
    "app.kubernetes.io/instance",
    "app.kubernetes.io/version",
    "helm.sh/chart",
}


def rendered(*flags: str, release: str = "kvatlas") -> list[dict[str, Any]]:
    return objects(run("helm", "template", release, str(CHART), "--namespace", "kvatlas", *flags))


def with_values(tmp_path: Path, values: dict[str, Any], *flags: str, release: str = "kvatlas") -> list[dict[str, Any]]:
    file = tmp_path / "values.yaml"
    file.write_text(yaml.safe_dump(values))
    return rendered("--values", str(file), *flags, release=release)


def comparable(value: Any) -> Any:
    """The value without what each tool adds, and without what means nothing: nulls, empty maps."""
    if isinstance(value, dict):
        ignored = {*OWN_LABELS, "namespace", "imagePullPolicy"}
        kept = {key: comparable(one) for key, one in value.items() if key not in ignored}
        return {key: one for key, one in kept.items() if one not in (None, {})}
    if isinstance(value, list):
        return [comparable(one) for one in value]
    return value


def by_name(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    named = {f"{one['kind']} {one['metadata']['name']}": comparable(one) for one in found}
    assert len(named) == len(found)
    return named


def pod_of(found: dict[str, Any], name: str) -> Any:
    return found[f"Deployment {name}"]["spec"]["template"]["spec"]


def environment(container: Any) -> dict[str, str]:
    return {one["name"]: one["value"] for one in container.get("env", ()) if "value" in one}
