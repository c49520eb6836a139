"""Every command, flag, variable and port in a manifest exists, and its values are accepted."""

import tomllib
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import pytest
import typer.main

from kvatlas.settings import ENV_PREFIX, IndexerSettings, ProcessSettings, PublishSettings
from kvatlas_cli.app import application
from tests.deployment.manifests import MANIFESTS, ROOT, Deployed, compose, deployed_containers, documents

DEPLOYED = deployed_containers()
APP = application()
GROUP: Any = typer.main.get_command(APP)


def settings_of(one: Deployed, monkeypatch: pytest.MonkeyPatch) -> ProcessSettings:
    """The settings with which the container's process would run. Raises what the process would report."""
    command = GROUP.commands[one.words[0]]
    context = command.make_context(one.words[0], list(one.words[1:]))
    for name, value in one.variables.items():
        monkeypatch.setenv(name, value)
    callback: Callable[..., None] = next(
        registered.callback for registered in APP.registered_commands if registered.name == one.words[0]
    )  # type: ignore[assignment]
    settings_class: type[ProcessSettings] = callback.settings_class  # type: ignore[attr-defined]
    flags = {name: value for name, value in context.params.items() if name in settings_class.model_fields}
    return settings_class.load(**flags)


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for name in os.environ:
        if name.startswith(ENV_PREFIX):
            monkeypatch.delenv(name)


def test_all_parts_are_deployed_somewhere() -> None:
    assert {one.words[0] for one in DEPLOYED} >= {"indexer", "publish", "simulate-engine"}
    assert [one.words[0] for one in DEPLOYED if one.where.startswith("compose")].count("indexer") == 2


@pytest.mark.parametrize("one", DEPLOYED, ids=str)
def test_the_command_accepts_its_flags_and_values(one: Deployed, monkeypatch: pytest.MonkeyPatch) -> None:
    assert one.words[0] in GROUP.commands
    settings_of(one, monkeypatch)


@pytest.mark.parametrize("one", DEPLOYED, ids=str)
def test_every_variable_is_a_setting_of_the_command(one: Deployed, monkeypatch: pytest.MonkeyPatch) -> None:
    fields = type(settings_of(one, monkeypatch)).model_fields
    ours = [name for name in one.variables if name.startswith(ENV_PREFIX)]
    assert [name for name in ours if name.removeprefix(ENV_PREFIX).lower() not in fields] == []


@pytest.mark.parametrize("one", [one for one in DEPLOYED if one.probes], ids=str)
def test_probes_use_the_status_page(one: Deployed, monkeypatch: pytest.MonkeyPatch) -> None:
    from indexer.status import application

    settings = settings_of(one, monkeypatch)
    assert isinstance(settings, IndexerSettings)
    assert settings.status_port == one.ports["status"]
    assert settings.status_host == "0.0.0.0"
    paths = {getattr(route, "path", "") for route in application(None).routes}  # type: ignore[arg-type]
    for probe in one.probes:
        assert probe["httpGet"]["port"] == "status" and probe["httpGet"]["path"] in paths


def test_a_sidecar_connects_to_its_engines_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = documents(ROOT / "k8s/vllm/vllm.yaml")[0]["spec"]["template"]["spec"]["containers"][0]
    sidecar = settings_of(next(one for one in DEPLOYED if one.where == "sidecar.yaml kvatlas"), monkeypatch)
    assert isinstance(sidecar, PublishSettings)
    words = " ".join(engine["args"])
    for endpoint in (sidecar.endpoint, sidecar.replay_endpoint):
        assert endpoint is not None and f"tcp://*:{urlsplit(endpoint).port}" in words
    assert sidecar.engine_url is not None and f"--port={urlsplit(sidecar.engine_url).port}" in engine["args"]
    assert f"--model={sidecar.model_id}" in engine["args"]
    assert sidecar.worker_id and sidecar.advertise_url == "http://10.1.2.3:8000"


def test_a_sidecar_connects_to_its_simulated_engines_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    by_name = {one.where: one for one in DEPLOYED}
    for number in (1, 2):
        engine = by_name[f"compose engine-{number}"].words
        sidecar = settings_of(by_name[f"compose sidecar-{number}"], monkeypatch)
        assert isinstance(sidecar, PublishSettings)
        assert f"--endpoint={sidecar.endpoint}" in engine
        assert f"--replay-endpoint={sidecar.replay_endpoint}" in engine
        assert f"--model={sidecar.model_id}" in engine
        assert sidecar.engine_url is not None and f"--port={urlsplit(sidecar.engine_url).port}" in engine
        assert compose()["services"][f"sidecar-{number}"]["network_mode"] == f"service:engine-{number}"
        assert sidecar.advertise_url == f"http://engine-{number}:8000"


def test_server_addresses_are_those_of_the_development_services() -> None:
    services = {
        one["metadata"]["name"]: {port["port"] for port in one["spec"]["ports"]}
        for path in MANIFESTS
        for one in documents(path)
        if one["kind"] == "Service"
    }
    (servers,) = documents(ROOT / "k8s/base/servers.yaml")
    for url in servers["data"].values():
        parts = urlsplit(url)
        assert parts.port in services[parts.hostname or ""]
    names = compose()["services"]
    for one in DEPLOYED:
        if one.where.startswith("compose"):
            assert all(urlsplit(url).hostname in names for name, url in one.variables.items() if name.endswith("_URL"))


def test_the_image_runs_the_installed_command() -> None:
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    (entrypoint,) = [line.removeprefix("ENTRYPOINT ") for line in lines if line.startswith("ENTRYPOINT")]
    assert entrypoint == '["kvatlas"]' and "kvatlas" in project["project"]["scripts"]
    copied = {word for line in lines if line.startswith("COPY") and "--from" not in line for word in line.split()[1:-1]}
    assert all((ROOT / path).exists() for path in copied)
    packages = {name for name in project["tool"]["setuptools"]["packages"]["find"]["include"] if "." not in name}
    assert packages <= copied
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert {f"!{path}" for path in copied} <= set(ignored)
    (install,) = [line for line in lines if "pip install" in line]
    extras = install.partition(".[")[2].partition("]")[0].split(",")
    assert extras and set(extras) <= set(project["project"]["optional-dependencies"])
    assert any(line.startswith("USER 10001") for line in lines)


def test_the_image_is_tagged_with_the_version() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    for path in (ROOT / "k8s").rglob("kustomization.yaml"):
        assert all(image["newTag"] == version for image in documents(path)[0].get("images", ()))
    images = {service["image"] for service in compose()["services"].values() if service["image"].startswith("kvatlas")}
    assert images == {f"kvatlas:{version}"}
