"""The chart renders what the overlays hold, and refuses values that can't be."""

import re
from collections.abc import Sequence
from typing import Any

import pytest

from tests.deployment.tools import ROOT, kustomized, objects, run

CHART = ROOT / "k8s/chart"
PRODUCTION = ["--values", str(CHART / "values-production.yaml")]
OWN_LABELS = {
    "app.kubernetes.io/managed-by",
    "app.kubernetes.io/instance",
    "app.kubernetes.io/version",
    "helm.sh/chart",
}
HASHED = re.compile(r"^(kvatlas-(?:nats|valkey|valkey-keeper))-[a-z0-9]{10}$")
"""A ConfigMap's name with the hash of its content, by which Kustomize makes pods restart; the chart has an annotation."""


def rendered(*flags: str) -> list[dict[str, Any]]:
    return objects(run("helm", "template", "kvatlas", str(CHART), "--namespace", "kvatlas", *flags))


def comparable(value: Any) -> Any:
    """Without what each tool adds of its own, and without what says nothing: nulls, empty maps."""
    if isinstance(value, dict):
        kept = {
            key: comparable(one)
            for key, one in value.items()
            if key not in {*OWN_LABELS, "checksum/config", "namespace", "imagePullPolicy"}
        }
        return {key: one for key, one in kept.items() if one not in (None, {})}
    if isinstance(value, list):
        return [comparable(one) for one in value]
    if isinstance(value, str) and (named := HASHED.match(value)):
        return named[1]
    return value


def by_name(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    named = {f"{one['kind']} {comparable(one['metadata']['name'])}": comparable(one) for one in found}
    assert len(named) == len(found)
    return named


@pytest.mark.parametrize(("overlay", "flags"), [("development", []), ("production", PRODUCTION)])
def test_the_chart_renders_what_the_overlay_holds(overlay: str, flags: list[str]) -> None:
    chart, kustomization = by_name(rendered(*flags)), by_name(kustomized(ROOT / "k8s" / overlay))
    assert sorted(chart) == sorted(kustomization)
    for name, wanted in kustomization.items():
        assert chart[name] == wanted, name


@pytest.mark.parametrize(
    ("values", "folder"),
    [
        ("", "picker"),
        (",gateway.route=envoy-ai-gateway", "envoy-ai-gateway"),
        (",gateway.route=istio", "istio"),
        (",gateway.route=kgateway", "kgateway"),
        (",gateway.kubernetesPool=true", "kubernetes-pool"),
        (",gateway.extensionObjects=inference.networking.x-k8s.io", "extension-objects"),
    ],
)
def test_the_charts_picker_is_that_of_the_examples(values: str, folder: str) -> None:
    chart, without = by_name(rendered("--set", "gateway.enabled=true" + values)), by_name(rendered())
    added = {name: one for name, one in chart.items() if name not in without}
    assert added == by_name(kustomized(ROOT / "k8s/gateway" / folder))


def test_a_gateway_of_another_class_and_a_picker_that_reads_all_of_the_api() -> None:
    flags = "gateway.enabled=true,gateway.route=istio,gateway.className=mesh.internal"
    flags += ",gateway.kubernetesPool=true,gateway.extensionObjects=llm-d.ai"
    found = by_name(rendered("--set", flags))
    assert found["Gateway inference"]["spec"]["gatewayClassName"] == "mesh.internal"
    rules = {rule["apiGroups"][0]: rule["verbs"] for rule in found["Role kvatlas-epp"]["rules"]}
    assert rules == {"inference.networking.k8s.io": ["get"], "": ["list"], "llm-d.ai": ["list"]}
    (container,) = found["Deployment kvatlas-epp"]["spec"]["template"]["spec"]["containers"]
    assert {"--kubernetes-pool", "--extension-objects=llm-d.ai", "--fallbacks=2"} <= set(container["args"])


@pytest.mark.parametrize("flags", [[], PRODUCTION, ["--set", "gateway.enabled=true"]])
def test_lint_finds_nothing(flags: list[str]) -> None:
    said = run("helm", "lint", "--strict", str(CHART), *flags)
    assert "[WARNING]" not in said and "[ERROR]" not in said and "0 chart(s) failed" in said


@pytest.mark.parametrize(
    ("value", "names"),
    [
        ("indexer.replica=3", "replica"),
        ("nats.mode=many", "mode"),
        ("secrets.redisUrl=http://x", "redisUrl"),
        ("image.registry=https://registry.example.com", "registry"),
        ("valkey.maxmemory=3", "maxmemory"),
        ("router.args[0]=port", "args"),
        ("indexer.resources.limits.memory=much", "memory"),
        ("telemetry.PATH=x", "telemetry"),
        ("gateway.failureMode=Open", "failureMode"),
        ("gateway.targetPorts[0]=0", "targetPorts"),
        ("gateway.route=nginx", "route"),
        ("gateway.extensionObjects=all", "extensionObjects"),
    ],
)
def test_a_wrong_value_is_refused_by_name(value: str, names: str) -> None:
    with pytest.raises(AssertionError, match=names):
        rendered("--set", value)


def test_a_router_of_longer_answers_gets_a_longer_end() -> None:
    (router,) = [
        one
        for one in rendered("--set", "router.graceSeconds=600")
        if one["kind"] == "Deployment" and one["metadata"]["name"] == "kvatlas-router"
    ]
    pod = router["spec"]["template"]["spec"]
    assert "--grace-s=600" in pod["containers"][0]["args"] and pod["terminationGracePeriodSeconds"] == 630


def test_images_come_from_the_registry_that_is_named() -> None:
    found = rendered("--set", "image.registry=registry.example.com/team/,image.tag=1.2.3")
    text = str(found)
    for image in ("kvatlas", "kvatlas-sidecar", "kvatlas-simulator"):
        assert f"'registry.example.com/team/{image}:1.2.3'" in text


def test_servers_of_ones_own_leave_ours_out() -> None:
    flags = "nats.mode=none,valkey.mode=none,secrets.create=false,simulatedEngines.replicas=0"
    kinds = {f"{one['kind']} {one['metadata']['name']}" for one in rendered("--set", flags)}
    assert not any("nats" in name or "valkey" in name or "Secret" in name or "engine" in name for name in kinds)
    assert {"Deployment kvatlas-indexer", "Deployment kvatlas-router"} <= kinds
