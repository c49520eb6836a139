"""The chart's promises about security: certificates, tokens, permissions in Kubernetes, network policies."""

from pathlib import Path

from tests.deployment.chart import EVERYTHING, by_name, environment, pod_of, rendered, with_values


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
