from collections.abc import Iterator

import pytest

from tests.attacks.attacked_fleet import AttackedServers, attacked_servers
from tests.router.conftest import *  # noqa: F403
from tests.router.gateway.conftest import envoy  # noqa: F401


@pytest.fixture(scope="module")
def with_users(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AttackedServers]:
    with attacked_servers(tmp_path_factory.mktemp("users"), users=True) as servers:
        yield servers


@pytest.fixture(scope="module", params=["with users", "defaults"])
def servers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[AttackedServers]:
    with attacked_servers(tmp_path_factory.mktemp("servers"), users=request.param == "with users") as started:
        yield started
