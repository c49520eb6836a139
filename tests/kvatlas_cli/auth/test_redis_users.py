"""What each user of the store may and may not call on real servers, inside functions too."""

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme
from redis import Redis
from redis.exceptions import NoPermissionError, ResponseError

from kvatlas.ejection import EjectionChange, EjectionStore, Verdict
from kvatlas.embedded.free_port import free_port
from kvatlas.embedded.valkey import ValkeyProcess
from kvatlas.errors import AccessDenied, InvalidValue, Unreachable
from kvatlas.fleet_store.allowances import Draw, Drawn
from kvatlas.fleet_store.fleet_store import FLEET_LIBRARY, FleetStore
from kvatlas.index.redis.index import open_redis_index
from kvatlas.index.redis.index_functions import INDEX_LIBRARY
from kvatlas.predictions.accuracy import AnswerReport
from kvatlas.predictions.store import write_answer_report
from kvatlas.reservations import RedisReservations, WorkerReport
from kvatlas.reservations.redis_calls import POOL_LIBRARY, pool_keys
from kvatlas.store.access import RedisAccess
from kvatlas.store.connection import open_store
from kvatlas.store.function_library import mark_key
from tests.kvatlas.reservations.asks import ask, offer
from tests.kvatlas_cli.auth.guarded_servers import GuardedServers
from tests.kvatlas_cli.auth.store_servers import DEBIAN, GuardedStore

pytestmark = pytest.mark.anyio

POOL = pool_keys("p")


@pytest.mark.parametrize("user", ["router", "auditor"])
@pytest.mark.parametrize(
    "words",
    [
        ["FLUSHALL"],
        ["FLUSHDB"],
        ["SET", "kva:x", "1"],
        ["DEL", "kva:{s0}:workers"],
        ["HSET", "kva:{s0}:workers", "w", "x"],
        ["HDEL", "kva:{fleet}:layout", "version"],
        ["HSET", POOL[0], "w", "a fleet record of one's own"],
        ["UNLINK", POOL[0]],
        ["FUNCTION", "FLUSH"],
        ["FUNCTION", "DELETE", "kvatlas"],
        ["FUNCTION", "LOAD", "REPLACE", "#!lua name=kvatlas\n"],
        ["EVAL", "return redis.call('FLUSHALL')", "0"],
        ["CONFIG", "SET", "maxmemory-policy", "allkeys-lru"],
        ["ACL", "LIST"],
        ["SHUTDOWN"],
        ["REPLICAOF", "NO", "ONE"],
        ["CLIENT", "KILL", "TYPE", "normal"],
        ["MONITOR"],
        ["KEYS", "*"],
        ["SCAN", "0"],
        ["GET", "other"],
        ["SUBSCRIBE", "x"],
    ],
    ids=" ".join,
)
def test_routers_and_auditors_may_neither_flush_nor_write_the_index(
    guarded_store: GuardedStore, user: str, words: list[str]
) -> None:
    with Redis.from_url(guarded_store.url(user)) as client, pytest.raises(NoPermissionError):
        client.execute_command(*words)


async def test_commands_inside_functions_are_checked(guarded_store: GuardedStore) -> None:
    """A router may call the functions of pools, but none that writes a fleet record or the index."""
    indexer = await open_store(guarded_store.url("indexer"), wait=False)
    router = await open_store(guarded_store.url("router"), wait=False)
    try:
        await open_redis_index(indexer, writer=True)
        await FleetStore(indexer).load_functions()
        await POOL_LIBRARY.call(router, "kvatlas_pool_beat", POOL, ["r", 5_000_000])
        assert await indexer.client.exists(mark_key(POOL_LIBRARY.name))  # the router uses it
        with pytest.raises(ResponseError, match=r"(?i)permission|can't (run|access)"):
            await router.fcall(POOL_LIBRARY.function("kvatlas_pool_forget"), POOL, ["w"])
        with pytest.raises(NoPermissionError):
            await router.fcall(INDEX_LIBRARY.function("kvatlas_retire"), ["kva:{s0}:workers"], [])
        with pytest.raises(NoPermissionError):
            await router.fcall(FLEET_LIBRARY.function("kvatlas_fleet_beat"), ["kva:{fleet}:members"], ["rogue", 10_000])
    finally:
        await router.close()
        await indexer.close()


async def test_a_router_may_write_all_that_routers_share_and_repair_it(guarded_store: GuardedStore) -> None:
    indexer = await open_store(guarded_store.url("indexer"), wait=False)
    router = await open_store(guarded_store.url("router"), wait=False)
    try:
        await FleetStore(indexer).load_functions()
        reservations = RedisReservations(router)
        found = await EjectionStore(router).exchange("p", "r", [EjectionChange("w", 0.0, 1.0, Verdict.EJECT, 0, 1.0)])
        assert found["w"].times == 1
        await write_answer_report(router, "r", "p", AnswerReport())
        fleet = FleetStore(router)
        await fleet.put_objects({"resp_1": "w"})
        assert await fleet.find_object("resp_1") == "w"
        assert await fleet.draw([Draw("requests:acme", 60, 0, 5)]) == [Drawn(5, 55)]
        await indexer.client.hset(POOL[1], "w", b"damaged")
        await reservations.report("p", {"v": WorkerReport(1)})
        evaluation = await reservations.evaluate("p", ask([offer("w"), offer("v")]))
        assert evaluation.worker_id in ("w", "v")
        guarded_store.server.command("SET", POOL[5], "text")
        assert await reservations.renew_lease("p", "r", 5_000_000) is False
    finally:
        await router.close()
        await indexer.close()


async def test_a_router_waits_for_an_indexer_if_the_functions_are_gone(guarded_store: GuardedStore) -> None:
    guarded_store.server.command("FUNCTION", "FLUSH")
    router = await open_store(guarded_store.url("router"), wait=False)
    try:
        with pytest.raises(Unreachable, match="may not load it; start an indexer of this version"):
            await POOL_LIBRARY.call(router, "kvatlas_pool_beat", POOL, ["r", 5_000_000])
    finally:
        await router.close()


async def test_an_indexer_may_not_flush_or_read_anything_else(guarded_store: GuardedStore) -> None:
    with Redis.from_url(guarded_store.url("indexer")) as client:
        for words in (
            ["FLUSHALL"],
            ["GET", "other"],
            ["CONFIG", "SET", "maxmemory", "1"],
            ["ACL", "LIST"],
            ["SHUTDOWN"],
        ):
            with pytest.raises(NoPermissionError):
                client.execute_command(*words)


def test_the_acl_file_has_no_password(servers: GuardedServers) -> None:
    text = (servers.folder / "users.acl").read_text()
    for user in ("indexer", "router", "auditor"):
        password = servers.redis_url(user).partition("//")[2].partition("@")[0].partition(":")[2]
        assert password and password not in text


# ------------------------------------------------------------ TLS


@pytest.fixture(scope="module")
def tls_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, dict[str, Path]]]:
    """The port of Debian's redis-server, which uses TLS and asks for certificates, and the files."""
    if (
        not DEBIAN.exists()
        or b"BUILD_TLS" in subprocess.run([DEBIAN, "--version"], capture_output=True, check=True).stdout
    ):
        pytest.skip("Debian's redis-server, which has TLS, is not installed; apt-get install redis-server")
    folder, authority, other = tmp_path_factory.mktemp("tls"), trustme.CA(), trustme.CA()
    files = {name: folder / f"{name}.pem" for name in ("ca", "other-ca", "server", "client", "stranger")}
    authority.cert_pem.write_to_path(files["ca"])
    other.cert_pem.write_to_path(files["other-ca"])
    authority.issue_cert("localhost", "127.0.0.1").private_key_and_cert_chain_pem.write_to_path(files["server"])
    authority.issue_cert("client").private_key_and_cert_chain_pem.write_to_path(files["client"])
    other.issue_cert("client").private_key_and_cert_chain_pem.write_to_path(files["stranger"])
    port = free_port()
    tls = {
        "tls-port": port,
        "tls-cert-file": files["server"],
        "tls-key-file": files["server"],
        "tls-ca-cert-file": files["ca"],
    }
    with ValkeyProcess(
        binary=DEBIAN, settings={key: str(value) for key, value in tls.items()} | {"tls-auth-clients": "yes"}
    ):
        yield port, files


async def test_mutual_tls_connects_with_the_right_certificates_alone(tls_store: tuple[int, dict[str, Path]]) -> None:
    port, files = tls_store
    url = f"rediss://127.0.0.1:{port}"

    def access(ca: str, client: str | None) -> RedisAccess:
        file = files[client] if client else None
        return RedisAccess(url, files[ca], file, file)

    store = await open_store(access("ca", "client"), wait=False)
    assert await store.client.ping()
    await store.close()
    for ca, client in (("ca", None), ("ca", "stranger"), ("other-ca", "client")):
        with pytest.raises(Unreachable):
            await open_store(access(ca, client), wait=False)


async def test_mistakes_with_certificates_are_told_at_once(tls_store: tuple[int, dict[str, Path]]) -> None:
    port, files = tls_store
    cases: list[tuple[RedisAccess, type[Exception], str]] = [
        (RedisAccess(f"redis://127.0.0.1:{port}", files["ca"]), InvalidValue, "expected rediss://"),
        (RedisAccess(f"rediss://127.0.0.1:{port}", Path("/none.pem")), AccessDenied, "No such file"),
    ]
    for access, kind, line in cases:
        with pytest.raises(kind, match=line):
            await open_store(access, wait=True)


def test_ci_says_how_to_get_the_server_with_tls() -> None:
    assert shutil.which("redis-server") or "redis-server" in (Path(__file__).parents[3] / ".ci/run").read_text()
