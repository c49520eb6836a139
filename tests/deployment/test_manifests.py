"""Every command, flag, variable, port, path and metric that a manifest names exists, and its values are accepted."""

import os
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from kvatlas.embedded.free_port import free_port
from kvatlas.embedded.nats import NatsProcess
from kvatlas.embedded.valkey import ValkeyProcess
from kvatlas.settings import (
    ENV_PREFIX,
    GatewaySettings,
    IndexerSettings,
    ProcessSettings,
    ProxySettings,
    PublishSettings,
)
from kvatlas_cli.app import COMMANDS
from kvatlas_router.gateway.server import LIVENESS, READINESS
from kvatlas_simulator.settings import EngineSettings
from tests.deployment.chart import PRODUCTION, rendered
from tests.deployment.manifests import (
    ENGINES,
    KSERVE,
    KUSTOMIZATIONS,
    PLACES,
    Deployed,
    Object,
    compose,
    containers,
    deployed,
    deployed_in,
    label_of,
    name_of,
    pods,
)
from tests.deployment.test_kubernetes import FLEETS, selected
from tests.deployment.tools import ROOT, kustomized
from tests.eventually import until_sync
from tests.kvatlas_cli.command_line import callback, command
from tests.kvatlas_cli.conftest import start_command

each_place = pytest.mark.parametrize("place", PLACES, ids=name_of)
OPENTELEMETRY = {
    "OTEL_METRICS_EXPORTER",
    "OTEL_TRACES_EXPORTER",
    "OTEL_TRACES_SAMPLER",
    "OTEL_TRACES_SAMPLER_ARG",
    "OTEL_EXPORTER_OTLP_ENDPOINT",
    "OTEL_EXPORTER_PROMETHEUS_HOST",
    "OTEL_EXPORTER_PROMETHEUS_PORT",
}
OTHERS = {"SSL_CERT_FILE", "POD_IP"}
"""OpenSSL's variable, and one that others are made from."""


def settings_of(one: Deployed, monkeypatch: pytest.MonkeyPatch) -> ProcessSettings:
    """The settings that the container's process would run with. Raises what the process would report."""
    context = command(one.words[0]).make_context(one.words[0], list(one.words[1:]))
    settings_class: type[ProcessSettings] = callback(one.words[0]).settings_class  # type: ignore[attr-defined]
    flags = {name: value for name, value in context.params.items() if name in settings_class.model_fields}
    with monkeypatch.context() as environment:
        for name, value in one.variables.items():
            environment.setenv(name, value)
        return settings_class.load(**flags)


def listens_at(settings: ProcessSettings) -> tuple[str, int | None, set[str]]:
    """The address of a process's pages, and their paths."""
    from kvatlas_indexer.status_page import application as indexer_status
    from kvatlas_publishers import status as publisher_status

    match settings:
        case IndexerSettings():
            pages = indexer_status.application(None, None, None, None)  # type: ignore[arg-type]
            return settings.status_host, settings.status_port, {route.path for route in pages.routes}  # type: ignore[attr-defined]
        case PublishSettings():
            pages = publisher_status.application([], 1)
            return settings.status_host, settings.status_port, {route.path for route in pages.routes}  # type: ignore[attr-defined]
        case ProxySettings() | EngineSettings():
            source = {ProxySettings: "router/proxy/application.py", EngineSettings: "simulator/http/server.py"}
            text = (ROOT / source[type(settings)]).read_text()
            return settings.host, settings.port, set(re.findall(r'Route\("([^"]+)"', text))
    raise AssertionError(f"{settings} serves nothing")


@pytest.fixture(autouse=True)
def no_settings_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith((ENV_PREFIX, "OTEL_")):
            monkeypatch.delenv(name)


@each_place
def test_a_router_that_stops_has_the_time_that_it_gives_to_what_runs(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for one in [one for one in deployed_in(place) if one.words[0] == "router"]:
        settings = settings_of(one, monkeypatch)
        assert isinstance(settings, ProxySettings)
        if one.pod:
            (container,) = one.pod["containers"]
            given, before = (
                one.pod["terminationGracePeriodSeconds"],
                container["lifecycle"]["preStop"]["sleep"]["seconds"],
            )
        else:
            given, before = int(compose()["services"][str(one).split()[-1]]["stop_grace_period"].removesuffix("s")), 0
        assert settings.grace_s >= 180
        assert given >= before + settings.drain_s + settings.grace_s + 10


def test_all_parts_are_deployed_everywhere() -> None:
    for place in ("compose", "k8s/development"):
        started = {one.words[0] for one in deployed() if one.where.startswith(place)}
        assert started >= {"indexer", "publish", "router", "simulate-engine"}, place


@each_place
def test_the_command_takes_its_flags_and_values(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for one in deployed_in(place):
        assert one.words[0] in COMMANDS
        settings_of(one, monkeypatch)


@each_place
def test_every_variable_is_a_setting_of_the_command(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for one in deployed_in(place):
        fields = type(settings_of(one, monkeypatch)).model_fields
        ours = {name for name in one.variables if name.startswith(ENV_PREFIX)}
        assert {name for name in ours if name.removeprefix(ENV_PREFIX).lower() not in fields} == set()
        assert one.variables.keys() - ours <= OPENTELEMETRY | OTHERS


@each_place
def test_probes_ask_a_page_that_is_served(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for one in [one for one in deployed_in(place) if one.ports]:
        settings = settings_of(one, monkeypatch)
        if isinstance(settings, GatewaySettings):
            assert settings.host == "0.0.0.0" and one.ports["metrics"] == 9464 and one.probes
            assert one.ports["grpc"] == settings.port and one.ports["health"] == settings.health_port
            for probe in one.probes:
                assert probe["grpc"]["port"] == settings.health_port
                assert probe["grpc"]["service"] in (LIVENESS, *READINESS)
            continue
        host, port, paths = listens_at(settings)
        assert host == "0.0.0.0" and one.probes
        for probe in one.probes:
            assert probe["httpGet"]["path"] in paths
            assert one.ports[probe["httpGet"]["port"]] == port
        metrics = [port for name, port in one.ports.items() if "metrics" in name]
        assert metrics == ([] if one.words[0] == "simulate-engine" else [9464])
        assert one.variables.get("OTEL_EXPORTER_PROMETHEUS_PORT", "9464") == "9464"


@each_place
def test_an_indexer_that_waits_for_its_servers_is_left_alone_for_a_day(place: Path) -> None:
    for one in [one for one in deployed_in(place) if one.probes and one.words[0] == "indexer"]:
        (startup,) = [probe for probe in one.probes if probe.get("failureThreshold", 0) > 1_000]
        assert startup["periodSeconds"] * startup["failureThreshold"] >= 86_400


@each_place
def test_a_sidecar_listens_where_its_engine_speaks(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for one in [one for one in deployed_in(place) if one.words[0] == "publish" and one.pod]:
        settings = settings_of(one, monkeypatch)
        assert isinstance(settings, PublishSettings)
        engine = one.pod["containers"][0]
        words = " ".join([*engine.get("command", ()), *engine.get("args", ())])
        for endpoint in (settings.endpoint, settings.replay_endpoint):
            assert endpoint is not None and re.search(rf"tcp://(\*|127\.0\.0\.1):{urlsplit(endpoint).port}\b", words)
        assert settings.engine_url is not None
        assert re.search(rf"--port[= ]{urlsplit(settings.engine_url).port}\b", words)
        assert re.search(
            rf"(--model=|--served-model-name=|--model-path=|serve |^){re.escape(settings.model_id)}( |$)", words
        )
        assert (settings.dp_size or 1) == int((re.findall(r"--data-parallel-size=(\d+)", words) or ["1"])[0])
        assert settings.worker_id == "llama-3_1-8b-7d9c5b6f4-x2x7k"
        assert settings.advertise_url is not None
        address = urlsplit(settings.advertise_url)
        ports = {port["containerPort"] for container in containers(one.pod) for port in container.get("ports", ())}
        assert address.hostname == "10.1.2.3" and address.port in ports


@pytest.mark.parametrize("folder", [folder for folder in ENGINES if folder.name != "simulated"], ids=name_of)
def test_an_engine_publishes_events(folder: Path) -> None:
    for _, pod in pods(kustomized(folder)):
        words = " ".join([*pod["containers"][0].get("command", ()), *pod["containers"][0].get("args", ())])
        assert '"publisher":"zmq"' in words and '"endpoint":"tcp://*:' in words and "--no-enable-prefix" not in words


@pytest.mark.parametrize("folder", FLEETS, ids=name_of)
def test_server_addresses_are_those_of_the_services(folder: Path) -> None:
    found = kustomized(folder)
    services = {
        one["metadata"]["name"]: {port["port"] for port in one["spec"]["ports"]}
        for one in found
        if one["kind"] == "Service"
    }
    urls = [
        urlsplit(value)
        for one in deployed()
        if one.where.startswith(name_of(folder))
        for name, value in one.variables.items()
        if name in ("KVATLAS_NATS_URL", "KVATLAS_REDIS_URL")
    ]
    assert len(urls) >= 3
    for url in urls:
        assert url.port in services[url.hostname or ""]


@pytest.fixture(scope="module")
def metrics() -> Iterator[str]:
    """The metrics pages of an indexer and a router that are started with the ConfigMap's variables."""
    (telemetry,) = [one for one in kustomized(ROOT / "k8s/base") if label_of(one) == "ConfigMap kvatlas-telemetry"]
    with NatsProcess() as nats, ValkeyProcess() as valkey:
        servers = {"KVATLAS_NATS_URL": nats.url, "KVATLAS_REDIS_URL": valkey.url}
        ports = [free_port(), free_port()]
        started = [
            start_command(
                *words,
                **servers,
                **{
                    **telemetry["data"],
                    "OTEL_EXPORTER_PROMETHEUS_HOST": "127.0.0.1",
                    "OTEL_EXPORTER_PROMETHEUS_PORT": str(port),
                },
            )
            for words, port in zip((["indexer"], ["router", "--port", "0"]), ports, strict=True)
        ]
        try:
            for process in started:
                assert process.stderr is not None
                assert any("is ready" in line or "router at" in line for line in process.stderr)

            def pages() -> str:
                read = [httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=5).text for port in ports]
                return "\n".join(read) if all("kvatlas_" in page for page in read) else ""

            yield until_sync(pages, what="both pages have metrics")
        finally:
            for process in started:
                process.terminate()
                process.communicate(timeout=30)


def test_metrics_that_scale_the_fleet_are_told(metrics: str) -> None:
    told = set(re.findall(r"^# TYPE (\w+) ", metrics, re.MULTILINE))
    queries = [
        trigger["metadata"]["query"]
        for one in rendered(*PRODUCTION)
        if one["kind"] == "ScaledObject"
        for trigger in one["spec"]["triggers"]
        if trigger["type"] == "prometheus"
    ]
    assert len(queries) == 2
    for query in queries:
        assert set(re.findall(r"kvatlas_\w+", query)) <= told


def test_what_is_scraped_is_served() -> None:
    found = rendered(*PRODUCTION)
    services = [one for one in found if one["kind"] == "Service"]
    (monitor,) = [one["spec"] for one in found if one["kind"] == "ServiceMonitor"]
    taken = [one for one in services if selected(monitor["selector"], one["metadata"]["labels"])]
    assert {one["metadata"]["name"] for one in taken} == {"kvatlas-indexer", "kvatlas-router"}
    for one in taken:
        assert {end["port"] for end in monitor["endpoints"]} <= {port["name"] for port in one["spec"]["ports"]}
    (monitor,) = [one["spec"] for one in found if one["kind"] == "PodMonitor"]
    engines: list[Object] = [one for folder in ENGINES for one in kustomized(folder)]
    for engine, pod in pods(engines):
        assert selected(monitor["selector"], engine["spec"]["template"]["metadata"]["labels"])
        ports = {port.get("name") for container in containers(pod) for port in container.get("ports", ())}
        assert {end["port"] for end in monitor["podMetricsEndpoints"]} <= ports


def test_kserves_pods_get_the_same_sidecar_as_deployments() -> None:
    (service,) = kustomized(KSERVE)
    ((_, patched),) = pods(kustomized(ROOT / "k8s/engines/vllm"))
    predictor = service["spec"]["predictor"]
    (sidecar,), (usual,) = predictor["initContainers"], patched["initContainers"]
    assert {**sidecar, "args": ()} == {**usual, "args": ()} and predictor["volumes"] == patched["volumes"]
    assert service["metadata"]["labels"]["kvatlas/publisher"] == "true"


def test_the_image_runs_the_installed_command() -> None:
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    (entrypoint,) = [line.removeprefix("ENTRYPOINT ") for line in lines if line.startswith("ENTRYPOINT")]
    assert entrypoint == '["kvatlas"]' and "kvatlas" in project["project"]["scripts"]
    copied = {word for line in lines if line.startswith("COPY") and "--from" not in line for word in line.split()[1:-1]}
    assert all((ROOT / path).exists() for path in copied)
    packages = {name for name in project["tool"]["setuptools"]["packages"]["find"]["include"] if "." not in name}
    assert packages <= {line.split()[-1].removeprefix("./") for line in lines if line.startswith("COPY")}
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert {f"!{path}" for path in copied} <= set(ignored)
    assert any(line.startswith("USER 10001") for line in lines)


def test_the_base_is_pinned_by_digest() -> None:
    (base,) = re.findall(r"^ARG BASE=(\S+)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    assert re.fullmatch(r"docker\.io/library/python:3\.\d+-slim@sha256:[0-9a-f]{64}", base)


def test_images_hold_what_their_containers_run() -> None:
    makefile = (ROOT / "Makefile").read_text()
    extras = {
        name: set(words.split(",")) for name, words in re.findall(r"^EXTRAS_(\S+) := (\S+)$", makefile, re.MULTILINE)
    }
    (default,) = re.findall(r"^ARG EXTRAS=(\S+)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    assert set(default.split(",")) == extras["kvatlas"]
    needed = {"indexer": "indexer", "publish": "publisher", "router": "router", "simulate-engine": "simulator"}
    needed["epp"] = "gateway"
    for folder in KUSTOMIZATIONS:
        for _, pod in pods(kustomized(folder)):
            for container in containers(pod):
                image = container["image"].partition(":")[0]
                if image in extras and "command" not in container:
                    assert needed[container["args"][0]] in extras[image]
    for service in compose()["services"].values():
        image = service["image"].partition(":")[0]
        if image in extras:
            assert service["build"].get("args", {}).get("EXTRAS", default).split(",") == sorted(
                extras[image], key=service["build"].get("args", {}).get("EXTRAS", default).split(",").index
            )


def test_images_are_tagged_with_the_version() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    images = [
        container["image"]
        for folder in KUSTOMIZATIONS
        for _, pod in pods(kustomized(folder))
        for container in containers(pod)
    ]
    images += [service["image"] for service in compose()["services"].values()]
    ours = {image.partition(":")[2] for image in images if image.startswith("kvatlas")}
    assert ours == {version}
    assert f"ARG VERSION={version}\n" in (ROOT / "Dockerfile").read_text()
    chart = (ROOT / "k8s/chart/Chart.yaml").read_text()
    assert f"\nversion: {version}\n" in chart and f"\nappVersion: {version}\n" in chart
