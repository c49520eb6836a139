"""The settings of a platform team: workloads, services, autoscaling."""

from pathlib import Path
from typing import Any

import pytest

from tests.deployment.chart import by_name, comparable, environment, pod_of, rendered, with_values

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


@pytest.mark.parametrize("by", ["keda", "hpa"])
def test_autoscaling_scales_every_deployment_and_nothing_sets_replicas(by: str) -> None:
    found = by_name(rendered("--set", f"autoscaling.enabled=true,autoscaling.by={by},gateway.enabled=true"))
    kind = "ScaledObject" if by == "keda" else "HorizontalPodAutoscaler"
    for name in ("kvatlas-indexer", "kvatlas-router", "kvatlas-epp"):
        assert found[f"{kind} {name}"]["spec"]["scaleTargetRef"]["name"] == name
        assert "replicas" not in found[f"Deployment {name}"]["spec"]
