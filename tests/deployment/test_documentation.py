"""Runs each command of docs/kubernetes.md, and of docs/gateway.md for Kubernetes, as far as possible without a cluster."""

import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from kvatlas.settings import ProxySettings
from kvatlas_cli.app import COMMANDS
from tests.deployment.chart import PRODUCTION, rendered
from tests.deployment.manifests import containers, is_ours, label_of, name_of, pods
from tests.deployment.secrets import printed, secrets, write_users
from tests.deployment.test_manifests import listens_at
from tests.deployment.tools import ROOT, kustomized, objects, run

PAGE = (ROOT / "docs/kubernetes.md").read_text()
BLOCKS = [block.splitlines() for block in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)]
LINES = [line for block in BLOCKS for line in block]
GATEWAY_LINES = re.findall(r"^(?:kubectl|helm) .*$", (ROOT / "docs/gateway.md").read_text(), re.MULTILINE)
FLEET = [*rendered(), *rendered(*PRODUCTION)]
"""The objects that the chart installs, in both ways."""
IMAGES = ["kvatlas", "kvatlas-sidecar", "kvatlas-simulator"]


def make(words: list[str]) -> None:
    done = subprocess.run(
        ["make", "--dry-run", "TOOL=podman", *words[1:]], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    for image in IMAGES:
        name = f"registry.example.com/team/{image}:0.1.0"
        assert f"--tag {name} ." in done.stdout and f"podman push {name}" in done.stdout


def helm(words: list[str]) -> None:
    if "k8s/servers" in words:  # its dependencies are not here
        assert (ROOT / "k8s/servers/Chart.lock").exists()
        return
    assert words[1] == "install"
    chart = words.index("k8s/chart")
    flags = [word for word in words[chart + 1 :] if word != "--create-namespace"]
    flags = [str(ROOT / word) if word.startswith("k8s/") else word for word in flags]
    found = objects(run("helm", "template", words[2], str(ROOT / "k8s/chart"), *flags))
    images = {container["image"] for _, pod in pods(found) for container in containers(pod)}
    assert any(image.startswith("registry.example.com/team/kvatlas:") for image in images)
    assert not any(re.match("kvatlas", image) for image in images), "an image that the registry does not have"


def kubectl(words: list[str]) -> None:
    words = words[3:] if words[1:3] == ["--namespace", "kvatlas"] else words[1:]
    match words:
        case ["create", "namespace", _]:
            assert run("kubectl", *words, "--dry-run=client", "--output=name")
        case ["apply", "--kustomize", "."]:
            pass  # the page's own overlay, see below
        case ["apply", "--kustomize", folder]:
            assert kustomized(ROOT / folder)
        case ["rollout", "status", what, "--timeout", _]:
            assert named(what)
        case ["exec", what, "--", "kvatlas", command]:
            assert any(map(is_ours, containers(named(what)["spec"]["template"]["spec"]))) and command in COMMANDS
        case ["port-forward", what, ports]:
            assert int(ports.partition(":")[2]) in {port["port"] for port in named(what)["spec"]["ports"]}
        case _:
            raise AssertionError(f"nothing checks kubectl {' '.join(words)}")


def curl(words: list[str]) -> None:
    address = urlsplit(f"http://{words[1]}")
    _, port, paths = listens_at(ProxySettings.load())
    assert address.port == port and address.path in paths | {"/v1/completions", "/v1/chat/completions"}
    assert json.loads(words[words.index("-d") + 1])["model"] == "demo"


def kvatlas(words: list[str]) -> None:
    assert words[1] == "auth" and words[words.index("--out") + 1] == "secrets"
    address = urlsplit(words[words.index(f"--{words[2]}-url") + 1])
    assert address.hostname == f"kvatlas-{'nats' if words[2] == 'nats' else 'valkey'}"


def create_secrets(words: list[str]) -> None:
    assert (ROOT / words[0]).exists() and words[1] == "secrets"
    assert "| kubectl --namespace kvatlas apply --filename -" in " ".join(words)
    named_there = {"kvatlas-indexer", "kvatlas-router", "kvatlas-publisher", "kvatlas-auditor"}
    assert {*named_there, "kvatlas-identities", "kvatlas-nats-users", "kvatlas-valkey-users"} == set(secrets())


def test_each_publisher_gets_a_secret_of_its_own(tmp_path: Path) -> None:
    users = tmp_path / "fleet.toml"
    users.write_text('[publishers.chat]\nworkers = ["chat-{0..3}"]\n[publishers.code]\nworkers = ["*"]\n')
    write_users(tmp_path / "out", "tls://n:4222", "rediss+sentinel://a,b/atlas", "--publishers", str(users))
    made = printed(tmp_path / "out", "llm")
    assert {"llm-publisher-chat", "llm-publisher-code", "llm-indexer", "llm-router"} <= set(made)
    assert made["llm-publisher-chat"]["KVATLAS_NATS_URL"].startswith("tls://chat:")
    assert made["llm-router"]["KVATLAS_REDIS_URL"].endswith("@a,b/atlas")


CHECKS: dict[str, Callable[[list[str]], None]] = {
    "make": make,
    "helm": helm,
    "kubectl": kubectl,
    "curl": curl,
    "kvatlas": kvatlas,
    "k8s/create-secrets": create_secrets,
}


def named(what: str) -> Any:
    """The object that `deployment/x` or `service/x` names."""
    kind, _, name = what.partition("/")
    return next(one for one in FLEET if label_of(one) == f"{kind.capitalize()} {name}")


def test_a_fleet_takes_six_commands() -> None:
    assert len(BLOCKS[0]) <= 6 and BLOCKS[0][0].startswith("make image push REGISTRY=")


@pytest.mark.parametrize("line", dict.fromkeys([*LINES, *GATEWAY_LINES]))
def test_a_command_is_right(line: str) -> None:
    words = shlex.split(line)
    CHECKS[words[0]](words)


def test_the_overlay_of_the_page_takes_images_from_the_registry(tmp_path: Path) -> None:
    (text,) = re.findall(r"```yaml\n# kustomization.yaml, .*?\n(.*?)```", PAGE, re.DOTALL)
    shutil.copytree(ROOT / "k8s", tmp_path / "k8s")
    (tmp_path / "kustomization.yaml").write_text(text)
    found = kustomized(tmp_path)
    images = {container["image"] for _, pod in pods(found) for container in containers(pod)}
    assert {f"registry.example.com/team/{image}:0.1.0" for image in IMAGES} <= images
    assert not any(re.match("kvatlas", image) for image in images)


def test_folders_and_files_that_are_named_exist() -> None:
    named_files = set(re.findall(r"`((?:k8s|tests|docs)/[\w./-]+)`", PAGE))
    assert len(named_files) > 10 and all((ROOT / name).exists() for name in named_files)
    engines = {name_of(path) for path in (ROOT / "k8s/engines").iterdir() if path.name != "sidecar"}
    assert engines <= named_files
