"""A store of each kind that knows the users of `kvatlas auth redis`."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvatlas.embedded.valkey import ValkeyProcess
from tests.kvatlas_cli.auth.guarded_servers import write

DEBIAN = Path("/usr/bin/redis-server")


@dataclass(frozen=True, slots=True)
class GuardedStore:
    """`folder` has what `kvatlas auth redis` wrote; the server's default user may do everything."""

    server: ValkeyProcess
    folder: Path

    def url(self, user: str) -> str:
        return (self.folder / f"{user}.redis-url").read_text().strip()


@pytest.fixture(scope="module", params=["valkey", "redis8", "debian"])
def guarded_store(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GuardedStore]:
    binary = DEBIAN if request.param == "debian" else None
    if request.param == "redis8":
        binary = request.getfixturevalue("redis8_binary")
    if binary == DEBIAN and not DEBIAN.exists():
        pytest.skip("Debian's redis-server is not installed; apt-get install redis-server")
    out = tmp_path_factory.mktemp("acl")
    write("redis", "--out", str(out))
    acl = out / "server.acl"
    acl.write_text((out / "users.acl").read_text().replace("default off", "default on nopass ~* &* +@all"))
    with ValkeyProcess(binary=binary, settings={"aclfile": str(acl)}) as server:
        write("redis", "--out", str(out), "--redis-url", server.url)
        yield GuardedStore(server, out)
