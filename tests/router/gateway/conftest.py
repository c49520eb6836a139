from collections.abc import Iterator

import pytest

from tests.router.gateway.envoy import EnvoyProcess, Ports


@pytest.fixture(scope="session")
def envoy() -> Iterator[EnvoyProcess]:
    """One Envoy for the session; pickers and engines take the ports that it knows, one test after the other."""
    with EnvoyProcess(Ports()) as process:
        yield process
