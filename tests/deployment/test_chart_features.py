"""The settings that other charts offer a platform team, and where this chart has them.

The others: llm-d (charts/llm-d-modelservice, April 2026), production-stack (the router of its helm chart, August 2026), nats
(helm/charts/nats 2.14.2) and valkey (0.11). Fields of engines, disks and servers, which this chart does not run, are left out.
"""

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deployment.chart import CHART, by_name, pod_of, with_values

FEATURES = [
    # feature, value of this chart, other charts that have it
    ("names", "fullnameOverride", "llm-d, nats, valkey"),
    ("labels and annotations of every object", "commonLabels", "nats, valkey"),
    ("registry, tag, digest, pull policy of images", "image.digests", "production-stack, nats, valkey"),
    ("pull secrets", "image.pullSecrets", "production-stack, nats, valkey"),
    ("replicas", "router.replicas", "llm-d, production-stack, nats, valkey"),
    ("resources", "router.resources", "llm-d, production-stack, nats, valkey"),
    ("further arguments", "workloads.extraArgs", "llm-d, production-stack"),
    ("further environment", "workloads.extraEnv", "llm-d, production-stack, nats, valkey"),
    ("environment from Secrets and ConfigMaps", "workloads.extraEnvFrom", "production-stack"),
    ("further volumes and their mounts", "workloads.extraVolumes", "llm-d, production-stack, nats, valkey"),
    ("init containers", "workloads.initContainers", "llm-d, production-stack, valkey"),
    ("containers beside", "workloads.extraContainers", "llm-d, nats, valkey"),
    ("node selector", "workloads.nodeSelector", "llm-d, production-stack, nats, valkey"),
    ("tolerations", "workloads.tolerations", "production-stack, nats, valkey"),
    ("affinity", "workloads.affinity", "production-stack, nats, valkey"),
    ("topology spread", "workloads.topologySpreadConstraints", "nats, valkey"),
    ("priority class", "workloads.priorityClassName", "production-stack, nats, valkey"),
    ("runtime class, scheduler, host aliases and other fields of a pod", "workloads.podSpec", "production-stack, nats"),
    ("annotations and labels of pods", "workloads.podAnnotations", "production-stack, nats, valkey"),
    ("annotations and labels of workloads", "workloads.annotations", "production-stack, nats, valkey"),
    ("update strategy", "workloads.strategy", "production-stack, nats, valkey"),
    ("security contexts", "workloads.podSecurityContext", "production-stack, nats, valkey"),
    ("probes", "workloads.probes", "production-stack, nats, valkey"),
    ("service account", "workloads.serviceAccount", "llm-d, production-stack, nats, valkey"),
    ("disruption budget", "workloads.podDisruptionBudget.minAvailable", "production-stack, nats, valkey"),
    ("eviction of unhealthy pods", "workloads.podDisruptionBudget.unhealthyPodEvictionPolicy", "valkey"),
    ("service type, node port, load balancer", "router.service.type", "production-stack, nats, valkey"),
    ("further service ports", "workloads.service.extraPorts", "production-stack, nats"),
    ("Ingress", "router.ingress", "production-stack, nats"),
    ("HTTPRoute", "router.httpRoute.parentRefs", "production-stack"),
    ("matches, filters and further rules of the HTTPRoute", "router.httpRoute.filters", "production-stack"),
    ("HorizontalPodAutoscaler", "autoscaling.by", "llm-d, production-stack"),
    ("KEDA, with fallback and behavior", "autoscaling.spec", "production-stack"),
    ("ServiceMonitor, PodMonitor", "monitoring.enabled", "llm-d, production-stack, nats, valkey"),
    ("relabelings and other fields of their endpoints", "monitoring.endpoint", "llm-d, production-stack, nats, valkey"),
    ("PrometheusRule", "monitoring.rules.enabled", "valkey"),
    ("dashboards", "monitoring.dashboards.enabled", ""),
    ("network policies, with egress", "networkPolicies.egress", "valkey"),
    ("TLS with a private authority", "tls.authoritySecret", "nats, valkey"),
    ("client certificates", "tls.nats.clientCertificates", "nats, valkey"),
    ("certificates from cert-manager", "certificates.issuerRef", ""),
    ("API keys from Secrets", "router.tokens", "production-stack"),
    ("traces", "telemetry", "llm-d, production-stack"),
    ("further objects", "extraObjects", "llm-d, nats"),
]


@pytest.mark.parametrize(("feature", "value", "others"), FEATURES, ids=[feature for feature, *_ in FEATURES])
def test_a_feature_of_other_charts_is_a_value_here(feature: str, value: str, others: str) -> None:
    found = yaml.safe_load((CHART / "values.yaml").read_text())
    for key in value.split("."):
        assert key in found, f"{feature}: no value {value}, which {others or 'this chart'} should have"
        found = found[key]


def test_probes_and_budgets_are_merged_over_the_defaults(tmp_path: Path) -> None:
    values: dict[str, Any] = {
        "gateway": {"enabled": True, "probes": {"liveness": {"failureThreshold": 9}}},
        "workloads": {
            "probes": {"startup": {"initialDelaySeconds": 7}},
            "podDisruptionBudget": {"unhealthyPodEvictionPolicy": "AlwaysAllow"},
            "service": {"extraPorts": [{"name": "sso", "port": 4180}]},
        },
        "router": {"tls": {"secret": "web"}},
    }
    found = by_name(with_values(tmp_path, values))
    for name, failures, kind in (("indexer", 6, "httpGet"), ("router", 6, "httpGet"), ("epp", 9, "grpc")):
        container = pod_of(found, f"kvatlas-{name}")["containers"][0]
        assert (container["startupProbe"]["initialDelaySeconds"], container["startupProbe"]["periodSeconds"]) == (7, 2)
        assert container["livenessProbe"]["failureThreshold"] == failures and kind in container["readinessProbe"]
        assert ("HTTPS" in str(container["livenessProbe"])) == (name == "router")
        assert found[f"PodDisruptionBudget kvatlas-{name}"]["spec"]["unhealthyPodEvictionPolicy"] == "AlwaysAllow"
        assert {"name": "sso", "port": 4180} in found[f"Service kvatlas-{name}"]["spec"]["ports"]


def test_routes_scalers_monitors_and_further_objects_take_what_is_given(tmp_path: Path) -> None:
    redirect = {"type": "RequestRedirect", "requestRedirect": {"scheme": "https"}}
    route = {"enabled": True, "parentRefs": [{"name": "shared"}], "filters": [redirect]}
    route |= {"matches": [{"path": {"type": "PathPrefix", "value": "/v1"}}], "extraRules": [{"filters": [redirect]}]}
    values: dict[str, Any] = {
        "router": {"httpRoute": route},
        "autoscaling": {"enabled": True, "spec": {"fallback": {"failureThreshold": 3, "replicas": 4}}},
        "monitoring": {"enabled": True, "endpoint": {"honorLabels": True}},
        "extraObjects": [
            {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "{{ .Release.Name }}-more"}},
            "apiVersion: v1\nkind: ConfigMap\nmetadata:\n  name: text\n",
        ],
        "global": {"imageRegistry": "mirror.example.com", "imagePullSecrets": [{"name": "mirror"}]},
    }
    found = by_name(with_values(tmp_path, values))
    first, second = found["HTTPRoute kvatlas-router"]["spec"]["rules"]
    assert first["matches"] == route["matches"] and first["filters"] == [redirect] == second["filters"]
    assert found["ScaledObject kvatlas-indexer"]["spec"]["fallback"]["replicas"] == 4
    assert found["ServiceMonitor kvatlas"]["spec"]["endpoints"][0]["honorLabels"] is True
    assert {"ConfigMap kvatlas-more", "ConfigMap text"} <= found.keys()
    pod = pod_of(found, "kvatlas-router")
    assert pod["containers"][0]["image"].startswith("mirror.example.com/kvatlas:")
    assert pod["imagePullSecrets"] == [{"name": "mirror"}]
    values["autoscaling"] = {"enabled": True, "by": "hpa", "spec": {"behavior": {"scaleUp": {"policies": []}}}}
    behavior = by_name(with_values(tmp_path, values))["HorizontalPodAutoscaler kvatlas-router"]["spec"]["behavior"]
    assert behavior["scaleDown"]["stabilizationWindowSeconds"] == 600 and "scaleUp" in behavior
