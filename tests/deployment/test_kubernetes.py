"""The manifests are strictly valid and safe."""

import shutil
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from tests.deployment.manifests import KUSTOMIZATIONS, MANIFESTS, ROOT, documents

PATCHES = {ROOT / "k8s/vllm/sidecar.yaml"}
NAMES = {path: str(path.relative_to(ROOT)) for path in (*MANIFESTS, *KUSTOMIZATIONS)}


def validate(document: dict[str, Any]) -> None:
    kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)


@pytest.mark.parametrize("path", [path for path in MANIFESTS if path not in PATCHES], ids=NAMES.__getitem__)
def test_every_manifest_is_valid(path: Path) -> None:
    found = documents(path)
    assert found
    for document in found:
        validate(document)


@pytest.mark.parametrize("folder", KUSTOMIZATIONS, ids=NAMES.__getitem__)
def test_every_kustomization_names_all_files_of_its_folder_and_no_others(folder: Path) -> None:
    (kustomization,) = documents(folder / "kustomization.yaml")
    named = [*kustomization.get("resources", ()), *(patch["path"] for patch in kustomization.get("patches", ()))]
    assert all((folder / name).exists() for name in named)
    assert {path.name for path in folder.glob("*.yaml")} - {"kustomization.yaml"} <= set(named)


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs kubectl to render")
@pytest.mark.parametrize("folder", KUSTOMIZATIONS, ids=NAMES.__getitem__)
def test_what_kustomize_renders_is_valid(folder: Path) -> None:
    done = subprocess.run(
        ["kubectl", "kustomize", str(folder)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    rendered = list(yaml.safe_load_all(done.stdout))
    for document in rendered:
        validate(document)
    assert rendered


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs kubectl to render")
def test_the_patch_adds_a_native_sidecar_and_does_not_change_the_engine() -> None:
    done = subprocess.run(
        ["kubectl", "kustomize", str(ROOT / "k8s/vllm")], capture_output=True, text=True, timeout=60, check=True
    )
    (engine,) = documents(ROOT / "k8s/vllm/vllm.yaml")
    (patched,) = yaml.safe_load_all(done.stdout)
    pod = patched["spec"]["template"]["spec"]
    (sidecar,) = pod["initContainers"]
    assert sidecar["restartPolicy"] == "Always" and sidecar["image"].startswith("kvatlas:")
    assert pod["containers"] == engine["spec"]["template"]["spec"]["containers"]


def test_the_store_never_evicts() -> None:
    (deployment,) = [one for one in documents(ROOT / "k8s/development/valkey.yaml") if one["kind"] == "Deployment"]
    words = deployment["spec"]["template"]["spec"]["containers"][0]["args"]
    directives = dict(zip(words[1::2], words[2::2], strict=True))
    assert directives["--maxmemory-policy"] == "noeviction"
    assert directives["--hash-max-listpack-entries"] == "128"


def test_our_containers_run_without_privileges() -> None:
    for path in MANIFESTS:
        for document in documents(path):
            pod = document.get("spec", {}).get("template", {}).get("spec", {})
            for container in (*pod.get("initContainers", ()), *pod.get("containers", ())):
                if container["image"].partition(":")[0] != "kvatlas":
                    continue
                context = {**pod.get("securityContext", {}), **container["securityContext"]}
                assert context["runAsNonRoot"] is True and context["readOnlyRootFilesystem"] is True
                assert context["allowPrivilegeEscalation"] is False and context["capabilities"] == {"drop": ["ALL"]}
                assert container["resources"]["limits"]["memory"] and container["resources"]["requests"]["cpu"]
                assert pod["enableServiceLinks"] is False


def test_one_indexer_keeps_running_when_nodes_are_drained() -> None:
    budget, deployment = sorted(
        documents(ROOT / "k8s/base/indexer.yaml"), key=lambda one: str(one["apiVersion"]), reverse=True
    )
    assert budget["kind"] == "PodDisruptionBudget" and budget["spec"]["minAvailable"] == 1
    assert budget["spec"]["selector"] == deployment["spec"]["selector"]
    assert deployment["spec"]["replicas"] >= 2
