"""The router client needs only the plain install's dependencies."""

import subprocess
import sys

ABSENT = [
    *(
        "anyio",
        "httpx",
        "nats",
        "prometheus_client",
        "pydantic_settings",
        "rich",
        "starlette",
        "typer",
        "uvicorn",
        "zmq",
    ),
    *(
        "opentelemetry.sdk",
        "kvatlas_publishers",
        "kvatlas_indexer",
        "kvatlas_router",
        "kvatlas_simulator",
        "kvatlas_cli",
        "kvatlas.settings",
    ),
    *("kvatlas.bus.connection", "kvatlas.bus.stream"),
]

SCRIPT = f"""
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name in {ABSENT!r}:
            raise ModuleNotFoundError(name, name=name)

sys.meta_path.insert(0, Absent())
import router_client
"""


def test_the_plain_install_is_enough() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_every_public_name_exists_and_is_documented() -> None:
    import router_client

    assert sorted(router_client.__all__) == list(router_client.__all__)
    for name in router_client.__all__:
        assert getattr(router_client, name).__doc__, name
