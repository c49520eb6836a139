"""Kustomize's output is strictly valid, consistent and safe."""

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from tests.deployment.chart import EVERYTHING, PRODUCTION, SIZES, matrix, production, rendered
from tests.deployment.custom_resources import model_of
from tests.deployment.manifests import (
    ENGINES,
    GATEWAYS,
    KUSTOMIZATIONS,
    Object,
    containers,
    is_ours,
    label_of,
    name_of,
    pods,
    secrets_and_maps,
)
from tests.deployment.secrets import secrets
from tests.deployment.tools import ROOT, kustomized

GATEWAY = [
    "--set",
    "gateway.enabled=true,gateway.route=istio,gateway.kubernetesPool=true,gateway.extensionObjects=llm-d.ai",
]
API_READERS = {ROOT / "k8s/gateway" / name for name in ("extension-objects", "kubernetes-pool")}
"""Examples whose picker reads the Kubernetes API."""
FLEETS = [ROOT / "k8s/development"]
CHARTS: dict[str, list[str]] = {
    "default": [],
    "gateway": GATEWAY,
    "everything": ["--set", EVERYTHING],
    **{f"{size} engines": production(size) for size in SIZES},
}
"""Values, by kind."""


def validate(document: Object) -> None:
    """Raises for a field that the resource does not have, or that has another type."""
    _validate(json.dumps(document, sort_keys=True))


@cache
def _validate(text: str) -> None:
    """`validate` of a document in JSON. Cached, because charts and examples share most documents."""
    document: Object = json.loads(text)
    if model := model_of(document["kind"]):
        read = model.model_validate(document).model_dump(mode="json", by_alias=True, exclude_unset=True)
        assert read == document, "fields that the resource does not have"
    elif document["kind"] == "InferenceService":  # its predictor is a pod's spec, and some fields more
        spec = {name: value for name, value in document["spec"]["predictor"].items() if name != "minReplicas"}
        validate({"apiVersion": "v1", "kind": "Pod", "metadata": document["metadata"], "spec": spec})
    else:
        kubernetes_validate.validate(dict(document), kubernetes_validate.latest_version(), strict=True)


def selected(selector: Any, labels: Any) -> bool:
    """True if the label selector matches these labels."""
    expressions = selector.get("matchExpressions", ())
    assert all(one["operator"] == "In" for one in expressions)
    return all(labels.get(key) == value for key, value in selector.get("matchLabels", {}).items()) and all(
        labels.get(one["key"]) in one["values"] for one in expressions
    )


def template_labels(found: Sequence[Object]) -> list[Any]:
    return [one["spec"]["template"]["metadata"]["labels"] for one, _ in pods(found)]


@pytest.mark.parametrize("folder", KUSTOMIZATIONS, ids=name_of)
def test_what_kustomize_renders_is_valid(folder: Path) -> None:
    found = kustomized(folder)
    assert found
    for document in found:
        validate(document)


@pytest.mark.parametrize("flags", [*CHARTS.values(), *matrix()], ids=str)
def test_what_helm_renders_is_valid_and_fits_together(flags: list[str]) -> None:
    found = rendered(*flags)
    for document in found:
        validate(document)
    selectors_take_something(found)


def test_a_field_that_a_custom_resource_does_not_have_is_found() -> None:
    (monitor,) = [one for one in rendered(*PRODUCTION) if one["kind"] == "PodMonitor"]
    wrong = yaml.safe_load(yaml.safe_dump(dict(monitor)).replace("interval:", "intervall:"))
    with pytest.raises(AssertionError, match="does not have"):
        validate(wrong)


def test_every_file_is_part_of_something() -> None:
    named = set()
    for path in (ROOT / "k8s").rglob("kustomization.yaml"):
        (read,) = yaml.safe_load_all(path.read_text())
        files = [*read.get("resources", ()), *(one["path"] for one in read.get("patches", ()))]
        files += [file for made in read.get("configMapGenerator", ()) for file in made["files"]]
        named |= {(path.parent / file).resolve() for file in files} | {path}
    kept = {path for path in (ROOT / "k8s").rglob("*") if path.suffix in (".yaml", ".conf", ".py")}
    charts = {path for path in kept if path.is_relative_to(ROOT / "k8s/chart") or path.parent == ROOT / "k8s/servers"}
    others = {ROOT / "k8s/dashboards", ROOT / "k8s/alerts"}
    assert {path for path in kept - charts - named if path.parent not in others} == set()


@pytest.mark.parametrize("folder", ENGINES, ids=name_of)
def test_an_engine_gets_a_native_sidecar_and_stays_as_it_was(folder: Path) -> None:
    (read,) = yaml.safe_load_all((folder / "kustomization.yaml").read_text())
    before = {one["metadata"]["name"]: one for one in yaml.safe_load_all((folder / read["resources"][0]).read_text())}
    for one, pod in pods(kustomized(folder)):
        original = before.pop(one["metadata"]["name"])["spec"]["template"]["spec"]
        (sidecar,) = [container for container in containers(pod) if container["image"].startswith("kvatlas-sidecar:")]
        assert sidecar in pod["initContainers"] and sidecar["restartPolicy"] == "Always"
        assert [other for other in pod["initContainers"] if other is not sidecar] == original.get("initContainers", [])
        for patched, engine in zip(pod["containers"], original["containers"], strict=True):
            assert {**patched, "lifecycle": None, "image": None} == {
                **engine,
                "lifecycle": None,
                "image": None,
            }
            # running requests have time to end after the sidecar reports draining, before Kubernetes kills the pod
            assert 5 <= patched["lifecycle"]["preStop"]["sleep"]["seconds"] < pod["terminationGracePeriodSeconds"]
        assert "startupProbe" not in sidecar and "readinessProbe" not in sidecar, (
            "an engine never waits for its sidecar"
        )
        assert sidecar["lifecycle"]["preStop"]["exec"]["command"] == ["sh", "-c", "kill -USR1 1"]
    assert before == {}


@pytest.mark.parametrize("folder", KUSTOMIZATIONS, ids=name_of)
def test_containers_run_without_privileges_and_within_limits(folder: Path) -> None:
    for one, pod in pods(kustomized(folder)):
        for container in containers(pod):
            if folder in ENGINES and not is_ours(container):
                continue  # engines are not ours
            context = {**pod.get("securityContext", {}), **container["securityContext"]}
            assert context["runAsNonRoot"] is True and context["readOnlyRootFilesystem"] is True, label_of(one)
            assert context["allowPrivilegeEscalation"] is False and context["capabilities"] == {"drop": ["ALL"]}
            assert context["seccompProfile"] == {"type": "RuntimeDefault"}
            assert container["resources"]["limits"]["memory"] and container["resources"]["requests"]["cpu"]
            assert pod.get("enableServiceLinks") is False or not is_ours(container)
            token = folder in API_READERS
            assert pod.get("automountServiceAccountToken") is token or folder in ENGINES


@pytest.mark.parametrize("folder", FLEETS, ids=name_of)
def test_every_selector_takes_something(folder: Path) -> None:
    selectors_take_something(kustomized(folder))


def selectors_take_something(found: Sequence[Object]) -> None:
    labels = template_labels(found)
    for one, pod in pods(found):
        own = one["spec"]["template"]["metadata"]["labels"]
        assert selected(one["spec"]["selector"], own)
        for spread in pod.get("topologySpreadConstraints", ()):
            assert selected(spread["labelSelector"], own)
    for one in found:
        spec = one.get("spec", {})
        match one["kind"]:
            case "Service":
                assert any(selected({"matchLabels": spec["selector"]}, own) for own in labels), label_of(one)
            case "PodDisruptionBudget":
                assert sum(selected(spec["selector"], own) for own in labels) == 1, label_of(one)
            case "NetworkPolicy":
                assert any(selected(spec["podSelector"], own) for own in labels), label_of(one)
            case "ScaledObject" | "HorizontalPodAutoscaler":
                names = {label_of(other) for other in found}
                assert f"Deployment {spec['scaleTargetRef']['name']}" in names


@pytest.mark.parametrize("production", [False, True])
def test_what_a_pod_names_exists(production: bool) -> None:
    found: Sequence[Object] = rendered(*PRODUCTION) if production else kustomized(ROOT / "k8s/development")
    there = {one["metadata"]["name"] for one in secrets_and_maps(found)} | set(secrets())
    there |= {one["spec"]["secretName"] for one in found if one["kind"] == "Certificate"}
    classes = {one["metadata"]["name"] for one in found if one["kind"] == "PriorityClass"}
    for one, pod in pods(found):
        assert pod.get("priorityClassName") in {None, *classes}
        claims = {claim["metadata"]["name"] for claim in one["spec"].get("volumeClaimTemplates", ())}
        volumes = {volume["name"]: volume for volume in pod.get("volumes", ())}
        for volume in volumes.values():
            kind = volume.get("secret", volume.get("configMap"))
            if kind and not kind.get("optional"):
                assert kind.get("secretName", kind.get("name")) in there, label_of(one)
        for container in containers(pod):
            assert {mount["name"] for mount in container.get("volumeMounts", ())} <= volumes.keys() | claims
            ports = {port["name"] for port in container.get("ports", ())}
            for key, probe in container.items():
                if key.endswith("Probe") and "httpGet" in probe:
                    assert probe["httpGet"]["port"] in ports
            for source in container.get("envFrom", ()):
                assert (source.get("secretRef") or source["configMapRef"])["name"] in there
            for entry in container.get("env", ()):
                if secret := entry.get("valueFrom", {}).get("secretKeyRef"):
                    assert secret["key"] in secrets()[secret["name"]]


@pytest.mark.parametrize("size", SIZES)
def test_every_service_in_production_outlives_a_drained_node(size: str) -> None:
    found = rendered(*production(size))
    budgets = [one for one in found if one["kind"] == "PodDisruptionBudget"]
    for one, _ in pods(found):
        own = one["spec"]["template"]["metadata"]["labels"]
        (budget,) = [other for other in budgets if selected(other["spec"]["selector"], own)]
        assert budget["spec"]["maxUnavailable"] == 1
        scaled = [other for other in found if label_of(other) == f"ScaledObject {one['metadata']['name']}"]
        replicas = scaled[0]["spec"]["minReplicaCount"] if scaled else one["spec"]["replicas"]
        assert replicas >= 2


def test_a_policy_opens_only_ports_that_are_listened_on() -> None:
    found = rendered("--set", EVERYTHING)
    policies = {one["metadata"]["name"]: one["spec"] for one in found if one["kind"] == "NetworkPolicy"}
    for one, pod in pods(found):
        if one["metadata"]["name"] in ("kvatlas-engine", "kvatlas-collector"):
            continue  # engines are not ours, and a collector is only scraped
        own = one["spec"]["template"]["metadata"]["labels"]
        (policy,) = [spec for spec in policies.values() if selected(spec["podSelector"], own)]
        listened = {port["containerPort"] for container in containers(pod) for port in container.get("ports", ())}
        assert {port["port"] for rule in policy["ingress"] for port in rule["ports"]} <= listened, label_of(one)
    engine = template_labels(kustomized(ROOT / "k8s/engines/vllm"))[0]
    peers = policies["kvatlas-nats"]["ingress"][0]["from"]
    assert any(selected(peer["podSelector"], engine) and peer.get("namespaceSelector") == {} for peer in peers)


def test_the_store_keeps_what_it_is_given() -> None:
    (deployment,) = [
        one for one in kustomized(ROOT / "k8s/development") if label_of(one) == "Deployment kvatlas-valkey"
    ]
    words = deployment["spec"]["template"]["spec"]["containers"][0]["args"]
    directives = dict(zip(words[1::2], words[2::2], strict=True))
    assert directives["--maxmemory-policy"] == "noeviction"
    assert directives["--hash-max-listpack-entries"] == "128"
    lines = yaml.safe_load((ROOT / "k8s/servers/values.yaml").read_text())["valkey"]["valkeyConfig"].splitlines()
    assert {"maxmemory-policy noeviction", "hash-max-listpack-entries 128"} <= set(lines)


@pytest.mark.parametrize("folder", GATEWAYS, ids=name_of)
def test_a_gateways_route_leads_to_a_pool_and_its_picker(folder: Path) -> None:
    found = {label_of(one): one for one in kustomized(folder)}
    pool = found["InferencePool kvatlas"]["spec"]
    picker = pool["endpointPickerRef"]
    (port,) = [
        port for port in found[f"Service {picker['name']}"]["spec"]["ports"] if port["port"] == picker["port"]["number"]
    ]
    (container,) = found["Deployment kvatlas-epp"]["spec"]["template"]["spec"]["containers"]
    ports = {each["name"]: each["containerPort"] for each in container["ports"]}
    assert f"--port={ports[port['targetPort']]}" in container["args"] and port["appProtocol"] == "http2"
    for route in (one for one in found.values() if one["kind"] == "HTTPRoute"):
        assert f"Gateway {route['spec']['parentRefs'][0]['name']}" in found
        for rule in route["spec"]["rules"]:
            assert [f"{backend['kind']} {backend['name']}" for backend in rule["backendRefs"]] == [
                "InferencePool kvatlas"
            ]
    labels = [one["spec"]["template"]["metadata"]["labels"] for one, _ in pods(kustomized(ROOT / "k8s/engines/vllm"))]
    assert any(selected(pool["selector"], own) for own in labels)
    advertised = [
        word.rpartition(":")[2]
        for _, pod in pods(kustomized(ROOT / "k8s/engines/vllm"))
        for each in containers(pod)
        for word in each.get("args", ())
        if word.startswith("--advertise-url=")
    ]
    assert advertised == [str(target["number"]) for target in pool["targetPorts"]]


@pytest.mark.parametrize("folder", GATEWAYS, ids=name_of)
def test_a_stopped_picker_has_time_for_what_runs(folder: Path) -> None:
    (pod,) = [pod for _, pod in pods(kustomized(folder))]
    (container,) = pod["containers"]
    flags = dict(word.split("=") for word in container["args"] if "=" in word)
    taken = container["lifecycle"]["preStop"]["sleep"]["seconds"] + int(flags["--drain-s"]) + int(flags["--grace-s"])
    assert taken < pod["terminationGracePeriodSeconds"]


@pytest.mark.parametrize(
    ("folder", "rules"),
    [
        (
            "extension-objects",
            [(["inference.networking.x-k8s.io"], ["inferenceobjectives", "inferencemodelrewrites"], ["list"])],
        ),
        (
            "kubernetes-pool",
            [(["inference.networking.k8s.io"], ["inferencepools"], ["get"]), ([""], ["pods"], ["list"])],
        ),
    ],
)
def test_the_picker_that_reads_the_api_may_do_that_and_nothing_else(
    folder: str, rules: list[tuple[list[str], list[str], list[str]]]
) -> None:
    found = {label_of(one): one for one in kustomized(ROOT / "k8s/gateway" / folder)}
    role = found["Role kvatlas-epp"]["rules"]
    assert [(rule["apiGroups"], rule["resources"], rule["verbs"]) for rule in role] == rules
    named = [rule["resourceNames"] for rule in role if "resourceNames" in rule]
    assert named == ([["kvatlas"]] if folder == "kubernetes-pool" else [])
    pod = found["Deployment kvatlas-epp"]["spec"]["template"]["spec"]
    (subject,) = found["RoleBinding kvatlas-epp"]["subjects"]
    assert pod["serviceAccountName"] == subject["name"] == found["ServiceAccount kvatlas-epp"]["metadata"]["name"]
