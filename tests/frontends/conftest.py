"""The engines' own servers. Opt-in, because they need environments of several GB (`make frontends`)."""

from collections.abc import Iterator

import httpx
import pytest

from tests.frontends.fleet import ENVIRONMENTS, Fleet, environment_folder, running_fleet, running_gateway

collect_ignore_glob = [] if ENVIRONMENTS else ["test_*.py"]


@pytest.fixture(scope="session")
def fleet() -> Iterator[Fleet]:
    """The servers of all tests: two of vLLM, one of SGLang, a router. Their logs stay next to the environments."""
    logs = environment_folder("logs")
    logs.mkdir(exist_ok=True)
    with running_fleet(logs) as running:
        yield running


@pytest.fixture(scope="session")
def gateway_url(fleet: Fleet) -> Iterator[str]:
    with running_gateway(fleet, environment_folder("logs")) as url:
        yield url


@pytest.fixture
def gateway(gateway_url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=gateway_url, timeout=60, trust_env=False) as client:
        yield client


@pytest.fixture(params=["vllm-small", "sglang-small"])
def model(request: pytest.FixtureRequest) -> str:
    """The model of each kind of engine, in turn."""
    name: str = request.param
    return name


@pytest.fixture
def router(fleet: Fleet) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=fleet.router, timeout=60, trust_env=False) as client:
        yield client


@pytest.fixture
def engine(fleet: Fleet, model: str) -> Iterator[httpx.Client]:
    """A client of the first engine that serves `model`, without the router."""
    with httpx.Client(base_url=fleet.engine(model).url, timeout=60, trust_env=False) as client:
        yield client
