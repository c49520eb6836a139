import importlib.util
from collections.abc import Iterator
from types import ModuleType

import pytest

from kvatlas.embedded.valkey import ValkeyProcess
from tests.deployment.production_servers import FILES, valkey_servers


@pytest.fixture(scope="package")
def valkeys(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[ValkeyProcess]]:
    """Six servers of the production overlay, which the keeper makes a cluster."""
    with valkey_servers(tmp_path_factory.mktemp("valkey")) as servers:
        yield servers


@pytest.fixture(scope="package")
def keeper() -> ModuleType:
    spec = importlib.util.spec_from_file_location("valkey_keeper", FILES / "valkey_keeper.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
