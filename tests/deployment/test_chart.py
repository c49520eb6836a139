"""The chart renders the development overlay by default, follows an upgrade, and refuses impossible values."""

import hashlib
import json
import shutil
from pathlib import Path

import pytest
import yaml

from tests.deployment.chart import (
    CHART,
    EVERYTHING,
    SIZES,
    by_name,
    comparable,
    pod_of,
    production,
    rendered,
    with_values,
)
from tests.deployment.tools import ROOT, kustomized, run


def test_the_chart_renders_what_the_development_overlay_holds() -> None:
    chart, kustomization = by_name(rendered()), by_name(kustomized(ROOT / "k8s/development"))
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
    (container,) = pod_of(found, "kvatlas-epp")["containers"]
    assert {"--kubernetes-pool", "--extension-objects=llm-d.ai", "--fallbacks=2"} <= set(container["args"])


def test_a_release_has_several_pools_each_with_a_picker(tmp_path: Path) -> None:
    pools = [
        {"name": "llama", "engineLabels": {"app": "llama"}, "targetPorts": [8000, 8001], "replicas": 3},
        {"name": "qwen", "engineLabels": {"app": "qwen"}, "route": "none", "nodeSelector": {"pool": "b"}},
    ]
    found = by_name(with_values(tmp_path, {"gateway": {"enabled": True, "route": "kgateway", "pools": pools}}))
    assert found["InferencePool kvatlas-llama"]["spec"]["selector"] == {"matchLabels": {"app": "llama"}}
    assert found["InferencePool kvatlas-qwen"]["spec"]["endpointPickerRef"]["name"] == "kvatlas-epp-qwen"
    assert found["Deployment kvatlas-epp-llama"]["spec"]["replicas"] == 3
    assert pod_of(found, "kvatlas-epp-qwen")["nodeSelector"] == {"pool": "b"}
    assert "nodeSelector" not in pod_of(found, "kvatlas-epp-llama")
    (container,) = pod_of(found, "kvatlas-epp-qwen")["containers"]
    assert "--pool-name=kvatlas-qwen" in container["args"]
    assert [name for name in found if name.startswith("HTTPRoute")] == ["HTTPRoute kvatlas-llama-inference"]


def test_releases_share_no_name_and_no_pod() -> None:
    first = rendered("--set", EVERYTHING, release="kvatlas")
    second = rendered("--set", f"{EVERYTHING},simulatedEngines.replicas=0", release="chat")
    assert not by_name(first).keys() & by_name(second).keys()
    assert all(one["metadata"]["name"].startswith("chat-kvatlas") for one in second)
    text = yaml.safe_dump_all([one for one in second if one["kind"] not in ("PrometheusRule", "ConfigMap")])
    for name in by_name(first):
        kind, _, plain = name.partition(" ")
        if kind not in ("PrometheusRule", "ConfigMap") and plain not in ("kvatlas", "inference"):
            assert f" {plain}\n" not in text, plain


def test_rules_and_dashboards_are_those_of_the_folders() -> None:
    found = by_name(rendered("--set", "monitoring.rules.enabled=true,monitoring.dashboards.enabled=true"))
    (shipped,) = kustomized(ROOT / "k8s/alerts")
    assert found["PrometheusRule kvatlas"]["spec"] == comparable(shipped["spec"])
    (shipped,) = kustomized(ROOT / "k8s/dashboards")
    shown = found["ConfigMap kvatlas-dashboards"]
    assert {name: text.strip() for name, text in shown["data"].items()} == {
        name: text.strip() for name, text in shipped["data"].items()
    }
    assert shown["metadata"]["labels"]["grafana_dashboard"] == "1"


@pytest.mark.parametrize("flags", [[], *map(production, SIZES), ["--set", EVERYTHING]])
def test_lint_finds_nothing(flags: list[str]) -> None:
    said = run("helm", "lint", "--strict", str(CHART), *flags)
    assert "[WARNING]" not in said and "[ERROR]" not in said and "0 chart(s) failed" in said


@pytest.mark.parametrize(
    ("value", "names"),
    [
        ("indexer.replica=3", "replica"),
        ("nats.mode=cluster", "mode"),
        ("secrets.redisUrl=http://x", "redisUrl"),
        ("image.registry=https://registry.example.com", "registry"),
        ("image.digests.kvatlas=latest", "digests"),
        ("valkey.maxmemory=3", "maxmemory"),
        ("router.extraArgs[0]=port", "extraArgs"),
        ("router.extraArgs[0]=--grace-s=9", "extraArgs"),
        ("indexer.resources.limits.memory=much", "memory"),
        ("telemetry.PATH=x", "telemetry"),
        ("gateway.failureMode=Open", "failureMode"),
        ("gateway.targetPorts[0]=0", "targetPorts"),
        ("gateway.route=nginx", "route"),
        ("gateway.pools[0].engineLabels.a=b", "name"),
        ("gateway.extensionObjects=all", "extensionObjects"),
        ("workloads.toleration=x", "toleration"),
        ("router.httpRoute.enabled=true", "parentRefs"),
        ("router.service.type=External", "type"),
        ("autoscaling.by=vpa", "by"),
        ("tls.nats.ca=x", "ca"),
    ],
)
def test_a_wrong_value_is_refused_by_name(value: str, names: str) -> None:
    with pytest.raises(AssertionError, match=names):
        rendered("--set", value)


@pytest.mark.parametrize(
    "url",
    ["redis://h", "rediss://h:1/2", "redis+cluster://a\\,redis+cluster://b", "rediss+sentinel://a\\,b/atlas"],
)
def test_every_url_of_a_store_is_taken(url: str) -> None:
    found = by_name(rendered("--set", f"secrets.redisUrl={url}"))
    assert found["Secret kvatlas-router"]["stringData"]["KVATLAS_REDIS_URL"] == url.replace("\\", "")


def test_a_router_of_longer_answers_gets_a_longer_end() -> None:
    pod = pod_of(by_name(rendered("--set", "router.graceSeconds=600")), "kvatlas-router")
    assert "--grace-s=600" in pod["containers"][0]["args"] and pod["terminationGracePeriodSeconds"] == 630


def test_images_come_from_the_registry_that_is_named() -> None:
    found = rendered("--set", "image.registry=registry.example.com/team/,image.tag=1.2.3")
    text = str(found)
    for image in ("kvatlas", "kvatlas-sidecar", "kvatlas-simulator"):
        assert f"'registry.example.com/team/{image}:1.2.3'" in text


def test_an_image_may_be_pinned_by_digest() -> None:
    digest = f"sha256:{'0' * 64}"
    found = by_name(rendered("--set", f"image.digests.kvatlas={digest},image.registry=r"))
    assert pod_of(found, "kvatlas-router")["containers"][0]["image"] == f"r/kvatlas@{digest}"


def test_servers_of_ones_own_leave_ours_out() -> None:
    flags = "nats.mode=none,valkey.mode=none,secrets.create=false,simulatedEngines.replicas=0"
    kinds = set(by_name(rendered("--set", flags)))
    assert not any("nats" in name or "valkey" in name or "Secret" in name or "engine" in name for name in kinds)
    assert {"Deployment kvatlas-indexer", "Deployment kvatlas-router"} <= kinds


SELECTORS = {
    "Deployment kvatlas-indexer": "kvatlas-indexer",
    "Deployment kvatlas-router": "kvatlas-router",
    "Deployment kvatlas-epp": "kvatlas-epp",
    "Deployment kvatlas-valkey": "kvatlas-valkey",
    "Deployment kvatlas-engine": "kvatlas-engine",
}
"""The selectors are those of version 0.1.0: Kubernetes refuses a Deployment whose selector changes."""


def test_an_upgrade_keeps_names_and_selectors() -> None:
    found = by_name(rendered("--set", "gateway.enabled=true"))
    for name, label in SELECTORS.items():
        assert found[name]["spec"]["selector"] == {"matchLabels": {"app.kubernetes.io/name": label}}
    services = {name for name in found if name.startswith("Service ")}
    assert services == {f"Service kvatlas-{name}" for name in ("indexer", "router", "epp", "nats", "valkey")}
    assert found["Service kvatlas-nats"]["spec"]["clusterIP"] == "None", "it can't be changed"
    secrets = {name for name in found if name.startswith("Secret ")}
    assert secrets == {f"Secret kvatlas-{name}" for name in ("indexer", "publisher", "router")}


def test_the_packed_chart_is_whole(tmp_path: Path) -> None:
    run("helm", "package", str(CHART), "--destination", str(tmp_path))
    (packed,) = tmp_path.glob("kvatlas-*.tgz")
    flags = ["--namespace", "kvatlas", "--set", EVERYTHING]
    assert run("helm", "template", "kvatlas", str(packed), *flags) == run(
        "helm", "template", "kvatlas", str(CHART), *flags
    )


def test_the_servers_chart_pins_what_it_depends_on(tmp_path: Path) -> None:
    folder = ROOT / "k8s/servers"
    chart, lock = (yaml.safe_load((folder / name).read_text()) for name in ("Chart.yaml", "Chart.lock"))
    keys = ("name", "version", "repository", "condition")
    wanted = [{key: one[key] for key in keys} for one in chart["dependencies"]]
    locked = [{key: one[key] for key in keys[:3]} for one in lock["dependencies"]]
    assert [{key: one[key] for key in keys[:3]} for one in wanted] == locked
    text = json.dumps([wanted, locked], separators=(",", ":")).encode()
    assert lock["digest"] == f"sha256:{hashlib.sha256(text).hexdigest()}", (
        "as Helm computes it; else `helm dependency build` refuses"
    )
    shutil.copytree(folder, tmp_path / "servers")
    with pytest.raises(AssertionError, match="missing in charts/"):
        run("helm", "template", "x", str(tmp_path / "servers"))
