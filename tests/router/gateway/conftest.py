from collections.abc import Iterator

import pytest

from tests.router.gateway.envoy import EnvoyProcess, Ports


@pytest.fixture(scope="session")
def envoy() -> Iterator[EnvoyProcess]:
    """One Envoy for the session; the pickers and engines of one test after another take the ports that it knows."""
    with EnvoyProcess(Ports()) as process:
        yield process
