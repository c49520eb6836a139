"""The chart renders the development overlay by default, what a platform team asks for, and refuses values that can't be."""

import hashlib
import itertools
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deployment.tools import ROOT, kustomized, objects, run

CHART = ROOT / "k8s/chart"
SIZES = ("4", "40", "400")


def production(size: str = "40") -> list[str]:
    """The flags of docs/kubernetes.md for a fleet of this many engines."""
    files = ("values-production.yaml", f"values-{size}-engines.yaml")
    return [word for file in files for word in ("--values", str(CHART / file))]


PRODUCTION = production()
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
    """Without what each tool adds of its own, and without what says nothing: nulls, empty maps."""
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


EVERYTHING = "gateway.enabled=true,gateway.route=istio,gateway.kubernetesPool=true,monitoring.enabled=true"
EVERYTHING += ",monitoring.rules.enabled=true,monitoring.dashboards.enabled=true,networkPolicies.enabled=true"
EVERYTHING += ",autoscaling.enabled=true,priorityClasses.enabled=true,certificates.enabled=true"
EVERYTHING += ",collector.enabled=true,router.ingress.enabled=true,workloads.serviceAccount.create=true"


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


WORKLOAD = {
    "nodeSelector": {"disk": "ssd"},
    "tolerations": [{"key": "gpu", "operator": "Exists"}],
    "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": []}}},
    "topologySpreadConstraints": [{"maxSkew": 2, "topologyKey": "rack", "whenUnsatisfiable": "DoNotSchedule"}],
    "extraArgs": ["--log-format=json"],
    "extraEnv": [{"name": "EXTRA", "value": "1"}],
    "extraEnvFrom": [{"secretRef": {"name": "more"}}],
    "extraVolumes": [{"name": "more", "emptyDir": {}}],
    "extraVolumeMounts": [{"name": "more", "mountPath": "/more"}],
    "initContainers": [{"name": "first", "image": "x"}],
    "extraContainers": [{"name": "beside", "image": "y"}],
    "annotations": {"a": "1"},
    "labels": {"b": "2"},
    "podAnnotations": {"c": "3"},
    "podLabels": {"d": "4"},
    "priorityClassName": "high",
    "podSecurityContext": {"fsGroup": 7},
    "securityContext": {"runAsUser": 8},
    "podSpec": {"runtimeClassName": "gvisor"},
    "serviceAccount": {"create": True, "annotations": {"role": "x"}},
    "podDisruptionBudget": {"minAvailable": "50%"},
    "service": {"annotations": {"e": "5"}, "labels": {"f": "6"}},
}


@pytest.mark.parametrize("part", ["indexer", "router", "gateway"])
@pytest.mark.parametrize("everywhere", [True, False])
def test_a_platform_team_finds_its_values(tmp_path: Path, part: str, everywhere: bool) -> None:
    values: dict[str, Any] = {"gateway": {"enabled": True}, "image": {"pullSecrets": [{"name": "registry"}]}}
    if everywhere:
        values["workloads"] = WORKLOAD
    else:
        values[part] = {**WORKLOAD, **values.get(part, {})}
    found = by_name(with_values(tmp_path, values))
    name = f"kvatlas-{'epp' if part == 'gateway' else part}"
    whole, pod = found[f"Deployment {name}"], pod_of(found, name)
    container = pod["containers"][0]
    for key in ("nodeSelector", "tolerations", "affinity", "topologySpreadConstraints", "initContainers"):
        assert pod[key] == WORKLOAD[key]
    assert pod["priorityClassName"] == "high" and pod["runtimeClassName"] == "gvisor"
    assert pod["imagePullSecrets"] == [{"name": "registry"}] and pod["serviceAccountName"] == name
    assert pod["securityContext"]["fsGroup"] == 7 and pod["securityContext"]["runAsNonRoot"] is True
    assert container["securityContext"]["runAsUser"] == 8 and container["securityContext"]["readOnlyRootFilesystem"]
    assert "--log-format=json" in container["args"] and environment(container)["EXTRA"] == "1"
    assert {"secretRef": {"name": "more"}} in container["envFrom"]
    assert {"name": "more", "mountPath": "/more"} in container["volumeMounts"]
    assert {"name": "more", "emptyDir": {}} in [comparable(one) | {"emptyDir": {}} for one in pod["volumes"][-1:]]
    assert pod["containers"][1]["name"] == "beside"
    assert whole["metadata"]["annotations"] == {"a": "1"} and whole["metadata"]["labels"]["b"] == "2"
    template = whole["spec"]["template"]["metadata"]
    assert template["annotations"] == {"c": "3"} and template["labels"]["d"] == "4"
    assert "d" not in whole["spec"]["selector"]["matchLabels"]
    assert found[f"ServiceAccount {name}"]["metadata"]["annotations"] == {"role": "x"}
    budget = found[f"PodDisruptionBudget {name}"]["spec"]
    assert budget["minAvailable"] == "50%" and "maxUnavailable" not in budget
    service = found[f"Service {name}"]["metadata"]
    assert service["annotations"] == {"e": "5"} and service["labels"]["f"] == "6"
    others = [one for one in found if one.startswith("Deployment kvatlas-") and one.endswith(("indexer", "router"))]
    assert everywhere or all("disk" not in str(found[one]) for one in others if not one.endswith(name))


def test_services_and_ways_in_from_outside(tmp_path: Path) -> None:
    service = {"type": "LoadBalancer", "port": 8443, "loadBalancerSourceRanges": ["10.0.0.0/8"]}
    ingress = {"enabled": True, "className": "nginx", "hosts": ["llm.example.com"], "tls": [{"secretName": "web"}]}
    route = {
        "enabled": True,
        "parentRefs": [{"name": "shared", "namespace": "gateways"}],
        "hostnames": ["llm.example.com"],
    }
    found = by_name(with_values(tmp_path, {"router": {"service": service, "ingress": ingress, "httpRoute": route}}))
    spec = found["Service kvatlas-router"]["spec"]
    assert spec["type"] == "LoadBalancer" and spec["ports"][0]["port"] == 8443
    assert spec["loadBalancerSourceRanges"] == ["10.0.0.0/8"]
    (rule,) = found["Ingress kvatlas-router"]["spec"]["rules"]
    assert (
        rule["host"] == "llm.example.com" and rule["http"]["paths"][0]["backend"]["service"]["name"] == "kvatlas-router"
    )
    (rule,) = found["HTTPRoute kvatlas-router"]["spec"]["rules"]
    assert rule["backendRefs"] == [{"name": "kvatlas-router", "port": 8443}]


def test_what_security_promises_is_switched_on_by_values(tmp_path: Path) -> None:
    values = {
        "tls": {server: {"privateAuthority": True, "clientCertificates": True} for server in ("nats", "redis")},
        "indexer": {"identities": {"secret": "who"}, "tls": {"secret": "pages"}, "tokens": {"secret": "readers"}},
        "router": {
            "tokens": {"secret": "clients"},
            "controlTokens": {"secret": "operators", "key": "ops"},
            "engineKeys": {"secret": "engines"},
            "tls": {"secret": "web"},
            "tokenizer": {"volume": {"persistentVolumeClaim": {"claimName": "models"}}, "subPath": "llama"},
        },
        "gateway": {"enabled": True, "tls": {"secret": "picker"}},
    }
    found = by_name(with_values(tmp_path, values))
    indexer, router, picker = (pod_of(found, f"kvatlas-{name}") for name in ("indexer", "router", "epp"))
    set_here = environment(indexer["containers"][0])
    assert set_here == {
        "KVATLAS_NATS_CA_FILE": "/etc/kvatlas/ca/ca.crt",
        "KVATLAS_REDIS_CA_FILE": "/etc/kvatlas/ca/ca.crt",
        "KVATLAS_NATS_CERT_FILE": "/etc/kvatlas/client-tls/tls.crt",
        "KVATLAS_NATS_KEY_FILE": "/etc/kvatlas/client-tls/tls.key",
        "KVATLAS_REDIS_CERT_FILE": "/etc/kvatlas/client-tls/tls.crt",
        "KVATLAS_REDIS_KEY_FILE": "/etc/kvatlas/client-tls/tls.key",
        "KVATLAS_HTTP_CERT_FILE": "/etc/kvatlas/server-tls/tls.crt",
        "KVATLAS_HTTP_KEY_FILE": "/etc/kvatlas/server-tls/tls.key",
        "KVATLAS_IDENTITIES": "/etc/kvatlas/identities/identities.json",
        "KVATLAS_HTTP_TOKEN_FILE": "/etc/kvatlas/tokens/tokens",
    }
    assert indexer["containers"][0]["readinessProbe"]["httpGet"]["scheme"] == "HTTPS"
    set_here = environment(router["containers"][0])
    assert "KVATLAS_NATS_CA_FILE" not in set_here, "a router reads NATS only for a copy of the index"
    assert set_here["KVATLAS_CONTROL_TOKEN_FILE"] == "/etc/kvatlas/control-tokens/ops"
    assert set_here["KVATLAS_ENGINE_KEY_FILE"] == "/etc/kvatlas/engine-keys/keys"
    assert set_here["KVATLAS_TOKENIZER"] == "/etc/kvatlas/tokenizer"
    assert environment(picker["containers"][0])["KVATLAS_TLS_CERTIFICATE"] == "/etc/kvatlas/server-tls/tls.crt"
    for pod in (indexer, router, picker):
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        mounts = {mount["name"]: mount for mount in pod["containers"][0]["volumeMounts"]}
        assert volumes.keys() == mounts.keys()
        assert all("subPath" not in one for name, one in mounts.items() if name != "tokenizer"), (
            "renewed files are seen"
        )
    secrets = {volume["secret"]["secretName"] for volume in router["volumes"] if "secret" in volume}
    assert secrets == {"kvatlas-ca", "kvatlas-router-tls", "clients", "operators", "engines", "web"}


def test_each_publisher_has_a_certificate_that_nats_takes_for_its_user(tmp_path: Path) -> None:
    values = {
        "certificates": {"enabled": True, "publishers": ["chat", "code"]},
        "tls": {"nats": {"clientCertificates": True}},
    }
    found = by_name(with_values(tmp_path, values))
    client = {
        one["spec"]["secretName"]: one["spec"]["dnsNames"]
        for name, one in found.items()
        if name.startswith("Certificate ") and one["spec"].get("usages") == ["client auth"]
    }
    roles = {f"kvatlas-{role}-tls": [role] for role in ("indexer", "publisher", "router")}
    assert client == roles | {f"kvatlas-publisher-{user}-tls": [user] for user in ("chat", "code")}


def test_no_part_may_do_more_in_kubernetes_than_read_what_it_follows() -> None:
    found = by_name(rendered("--set", f"{EVERYTHING},gateway.extensionObjects=llm-d.ai"))
    assert not [name for name in found if name.startswith("ClusterRole")]
    allowed = {
        "Role kvatlas-collector": {("", "pods", "list")},
        "Role kvatlas-epp": {
            ("inference.networking.k8s.io", "inferencepools", "get"),
            ("", "pods", "list"),
            ("llm-d.ai", "inferenceobjectives", "list"),
            ("llm-d.ai", "inferencemodelrewrites", "list"),
        },
    }
    assert {
        name: {
            (group, resource, verb)
            for rule in one["rules"]
            for group in rule["apiGroups"]
            for resource in rule["resources"]
            for verb in rule["verbs"]
        }
        for name, one in found.items()
        if name.startswith("Role ")
    } == allowed
    bound = {one["subjects"][0]["name"] for name, one in found.items() if name.startswith("RoleBinding ")}
    for name, one in found.items():
        if name.startswith(("Deployment ", "StatefulSet ")):
            pod = one["spec"]["template"]["spec"]
            with_token = pod.get("automountServiceAccountToken") is not False
            assert with_token == (pod.get("serviceAccountName") in bound), name


def test_a_collector_may_list_pods_and_nothing_else() -> None:
    found = by_name(rendered("--set", "collector.enabled=true,collector.selector=app in (vllm\\,sglang)"))
    assert found["Role kvatlas-collector"]["rules"] == [{"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]}]
    pod = pod_of(found, "kvatlas-collector")
    (subject,) = found["RoleBinding kvatlas-collector"]["subjects"]
    assert pod["serviceAccountName"] == subject["name"] == found["ServiceAccount kvatlas-collector"]["metadata"]["name"]
    assert pod["automountServiceAccountToken"] is True
    (container,) = pod["containers"]
    assert "--selector=app in (vllm,sglang)" in container["args"]
    assert {"secretRef": {"name": "kvatlas-publisher"}} in container["envFrom"]


@pytest.mark.parametrize("by", ["keda", "hpa"])
def test_autoscaling_scales_every_deployment_and_nothing_sets_replicas(by: str) -> None:
    found = by_name(rendered("--set", f"autoscaling.enabled=true,autoscaling.by={by},gateway.enabled=true"))
    kind = "ScaledObject" if by == "keda" else "HorizontalPodAutoscaler"
    for name in ("kvatlas-indexer", "kvatlas-router", "kvatlas-epp"):
        assert found[f"{kind} {name}"]["spec"]["scaleTargetRef"]["name"] == name
        assert "replicas" not in found[f"Deployment {name}"]["spec"]


def test_network_policies_open_what_each_part_needs_and_nothing_else() -> None:
    flags = "networkPolicies.enabled=true,networkPolicies.egress.enabled=true,gateway.enabled=true,gateway.kubernetesPool=true"
    found = by_name(rendered("--set", flags))

    def ports(name: str, way: str) -> set[int]:
        return {one["port"] for rule in found[f"NetworkPolicy {name}"]["spec"][way] for one in rule.get("ports", ())}

    telemetry = {4317, 4318}
    assert ports("kvatlas-indexer", "ingress") == {9464}
    assert ports("kvatlas-indexer", "egress") == {53, 4222, 6379, 26379} | telemetry
    assert ports("kvatlas-router", "egress") == {53, 6379, 26379, 8000} | telemetry
    assert ports("kvatlas-epp", "ingress") == {9002, 9003, 9464}
    assert ports("kvatlas-epp", "egress") == {53, 6379, 26379, 8000, 443, 6443} | telemetry
    assert ports("kvatlas-nats", "ingress") == {4222} and ports("kvatlas-valkey", "ingress") == {6379}


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
"""Of version 0.1.0: Kubernetes refuses a Deployment whose selector changes."""


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
    """Every pair of the matrix' switches, and all of them."""
    pairs = [list(pair) for pair in itertools.combinations(MATRIX, 2)]
    return [["--set", ",".join(chosen)] for chosen in [*pairs, MATRIX]]


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
