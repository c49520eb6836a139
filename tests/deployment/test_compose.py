"""The compose file is strictly valid and consistent, and keeps its limits."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

from kvatlas.settings import PublishSettings
from tests.deployment.manifests import COMPOSE, Deployed, compose, deployed_in
from tests.deployment.test_manifests import listens_at, settings_of
from tests.deployment.tools import ROOT
from tests.lazy_module import LazyModule

compose_spec = LazyModule("compose_spec")

SERVICES = compose()["services"]
COMPOSED = {one.where.removeprefix("compose "): one for one in deployed_in(COMPOSE)}
ASKED = ["atlas"]
"""Services that end with an answer."""


def variables() -> dict[str, str]:
    lines = [line for line in (ROOT / ".env").read_text().splitlines() if line and not line.startswith("#")]
    return dict(line.split("=", 1) for line in lines)


def expanded(value: Any) -> Any:
    """The value with the variables of .env expanded."""
    if isinstance(value, dict):
        return {key: expanded(one) for key, one in value.items()}
    if isinstance(value, list):
        return [expanded(one) for one in value]
    return re.sub(r"\$\{(\w+)\}", lambda found: variables()[found[1]], value) if isinstance(value, str) else value


def mounted() -> Iterator[Path]:
    for service in SERVICES.values():
        for volume in service.get("volumes", ()):
            if volume.startswith("./"):
                yield ROOT / volume.partition(":")[0]


def test_it_is_valid() -> None:
    compose_spec.PyCompose.from_yaml(yaml.safe_dump(expanded(compose()))).validate()


def test_a_key_that_compose_does_not_have_is_found() -> None:
    wrong = yaml.safe_load(yaml.safe_dump(expanded(compose())))
    wrong["services"]["nats"]["mem_limits"] = "1g"
    with pytest.raises(ValueError, match="mem_limits"):
        compose_spec.PyCompose.from_yaml(yaml.safe_dump(wrong))


def test_its_variables_are_those_of_the_env_file() -> None:
    named = set(re.findall(r"\$\{(\w+)\}", (ROOT / "docker-compose.yml").read_text()))
    assert named == variables().keys()


def test_what_it_mounts_is_there() -> None:
    found = list(mounted())
    assert found and all(path.exists() for path in found)


def test_everything_that_shows_the_fleet_is_started() -> None:
    assert {"collector", "prometheus", "grafana", "traces", "router-1", "router-2"} <= SERVICES.keys()


@pytest.mark.parametrize("name", SERVICES)
def test_every_service_is_limited_and_unprivileged(name: str) -> None:
    service = SERVICES[name]
    assert service["mem_limit"] and service["cpus"] and service["pids_limit"]
    assert service["read_only"] is True and service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    for port in service.get("ports", ()):
        assert port.startswith("127.0.0.1:"), "nothing listens beyond loopback"


def test_the_store_keeps_what_it_is_given_and_fits_its_limit() -> None:
    words = expanded(SERVICES["valkey"]["command"])
    directives = dict(zip(words[1::2], words[2::2], strict=True))
    assert directives["--maxmemory-policy"] == "noeviction"
    assert directives["--hash-max-listpack-entries"] == "128"
    assert SERVICES["valkey"]["mem_limit"] == "1g" and int(directives["--maxmemory"].removesuffix("mb")) <= 800


def test_addresses_are_those_of_services() -> None:
    for one in COMPOSED.values():
        for name, value in one.variables.items():
            if "://" in value:
                assert urlsplit(value).hostname in SERVICES, f"{one} {name}"


@pytest.mark.parametrize("name", [name for name in COMPOSED if "healthcheck" in SERVICES[name]])
def test_health_is_asked_where_it_is_told(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _, port, paths = listens_at(settings_of(COMPOSED[name], monkeypatch))
    asked = urlsplit(SERVICES[name]["healthcheck"]["test"][-1])
    assert asked.port == port and asked.path in paths


def test_every_process_has_a_health_check() -> None:
    assert {name for name in COMPOSED if "healthcheck" not in SERVICES[name]} == set(ASKED)


@pytest.mark.parametrize("number", [1, 2])
def test_a_sidecar_outlives_its_engine_and_shares_its_events_with_nobody(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, sidecar = f"engine-{number}", f"sidecar-{number}"
    assert "network_mode" not in SERVICES[sidecar]
    depends: Any = SERVICES[sidecar]["depends_on"]
    assert engine not in depends
    settings = settings_of(COMPOSED[sidecar], monkeypatch)
    assert isinstance(settings, PublishSettings)
    for flag, url in (("endpoint", settings.endpoint), ("replay-endpoint", settings.replay_endpoint)):
        address = urlsplit(url or "")
        assert address.hostname == engine and f"--{flag}=tcp://*:{address.port}" in COMPOSED[engine].words
    assert settings.engine_url == f"http://{engine}:8000" and "--port=8000" in COMPOSED[engine].words
    assert f"--model={settings.model_id}" in COMPOSED[engine].words
    assert compose()["networks"][engine] == {"internal": True}
    others = {name for name, service in SERVICES.items() if engine in service.get("networks", ())}
    assert others == {engine, sidecar, "router-1", "router-2"}


def test_every_process_is_scraped() -> None:
    (read,) = yaml.safe_load_all((ROOT / "compose/prometheus.yaml").read_text())
    (job,) = read["scrape_configs"]
    told = {
        f"{name}:{one.variables['OTEL_EXPORTER_PROMETHEUS_PORT']}"
        for name, one in COMPOSED.items()
        if "OTEL_EXPORTER_PROMETHEUS_PORT" in one.variables
    }
    assert set(job["static_configs"][0]["targets"]) == told
    assert read["rule_files"] == ["/etc/prometheus/rules/*.yaml"]


def test_traces_find_their_store() -> None:
    (collector,) = yaml.safe_load_all((ROOT / "compose/collector.yaml").read_text())
    assert collector["receivers"]["otlp"]["protocols"]["http"]["endpoint"] == "0.0.0.0:4318"
    ends: list[Deployed] = [one for one in COMPOSED.values() if "OTEL_EXPORTER_OTLP_ENDPOINT" in one.variables]
    assert ends and {one.variables["OTEL_EXPORTER_OTLP_ENDPOINT"] for one in ends} == {"http://collector:4318"}
    assert collector["exporters"]["otlp"]["endpoint"].partition(":")[0] in SERVICES
    (sources,) = yaml.safe_load_all((ROOT / "compose/grafana/datasources/datasources.yaml").read_text())
    assert {urlsplit(one["url"]).hostname for one in sources["datasources"]} <= SERVICES.keys()
    (boards,) = yaml.safe_load_all((ROOT / "compose/grafana/dashboards/dashboards.yaml").read_text())
    inside = boards["providers"][0]["options"]["path"]
    assert any(volume.endswith(f":{inside}:ro") for volume in SERVICES["grafana"]["volumes"])
