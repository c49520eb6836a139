"""`make wheel-test`: the wheel with each extra in an empty environment, with the newest versions of the package index."""

import tomllib
from pathlib import Path

import pytest

from tests.project.distribution import ROOT, build, copy_checkout, install, make_environment, run

NEEDS = {
    "": "from router_client import Prompt, RouterClient, Scope",
    "cli": "import kvatlas_cli.commands.workers, kvatlas_cli.commands.overlap, kvatlas_cli.commands.route",
    "publisher": "import kvatlas_publishers.sidecar, kvatlas_publishers.sources.drained_engine, kvatlas_publishers.status",
    "indexer": "import kvatlas_indexer.service, kvatlas_indexer.status_page.application, kvatlas_cli.commands.doctor",
    "tokenizer": "import kvatlas_router.tokens.local_tokenizer",
    "replica": "import kvatlas.index.local_copy, kvatlas.bus.connection",
    "router": "import kvatlas_router.proxy_service, kvatlas_router.tenancy.issuer",
    "gateway": "import kvatlas_router.gateway.service",
    "litellm": "from kvatlas_router.litellm import KvatlasRouting",
    "embedded": "from kvatlas.embedded.valkey import ValkeyProcess\nfrom kvatlas.embedded.nats import NatsProcess\n"
    "with ValkeyProcess(), NatsProcess(): pass",
    "simulator": "import kvatlas_simulator.service, matplotlib",
    "all": "import kvatlas_cli.commands.up, kvatlas_cli.commands.demo, kvatlas_cli.commands.epp",
    "dev": "import pytest, mypy, envoy",
}
"""Modules that need the extra; they must be importable."""
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    copy_checkout(folder / "checkout")
    return build("wheel", folder / "checkout", folder)


def test_every_extra_is_installed_here() -> None:
    assert NEEDS.keys() - {""} == EXTRAS.keys()


@pytest.mark.timeout(1_200)
@pytest.mark.parametrize("extra", NEEDS)
def test_the_wheel_installs_with_the_extra_in_an_empty_environment(wheel: Path, tmp_path: Path, extra: str) -> None:
    python = make_environment(tmp_path / "environment")
    install(python, f"{wheel}[{extra}]" if extra else str(wheel))
    run(python, "-c", NEEDS[extra], cwd=tmp_path)
