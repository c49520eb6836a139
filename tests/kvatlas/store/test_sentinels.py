"""A store whose primary is chosen by Sentinel: real servers and Sentinels, one of which dies."""

import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from redis.exceptions import RedisError

from kvatlas.errors import AccessDenied, Unreachable
from kvatlas.redaction import redact_url
from kvatlas.store.access import RedisAccess
from kvatlas.store.connection import connected_store
from kvatlas.store.sentinel_url import SentinelUrl
from tests.certificates import Authority
from tests.eventually import until
from tests.kvatlas.store.sentinel_servers import (
    NAME,
    SENTINEL_PASSWORD,
    Files,
    WatchedPair,
    WatchedServer,
    watched_pair,
)

pytestmark = pytest.mark.anyio

LIBRARY = "#!lua name=adds\nredis.register_function('add', function(k, a) return redis.call('INCRBY', k[1], a[1]) end)"


@pytest.fixture
def pair() -> Iterator[WatchedPair]:
    with watched_pair() as running:
        yield running


def is_replica(server: WatchedServer) -> bool:
    try:
        return bool(server.command("INFO")["role"] == "slave")
    except RedisError:  # Sentinel closes all connections to a server that it makes a replica
        return False


async def adds_again(access: RedisAccess, pair: WatchedPair) -> None:
    """Wait until calls are answered by the primary that replaces the dead one."""
    async with connected_store(access, wait=False) as store:
        await store.load_functions(LIBRARY)
        assert await store.fcall("add", ["count"], [1]) == 1
        first = pair.primary

        async def copied() -> bool:
            other = next(one for one in pair.servers if one is not first)
            return bool(other.command("GET", "count") == b"1")

        await until(copied, what="the replica has the number")
        first.kill()

        async def answered() -> bool:
            try:
                return bool(await store.fcall("add", ["count"], [1]) == 2)
            except Unreachable:
                return False

        await until(answered, what="the new primary answers")
        assert pair.primary is not first
        assert await store.read_config("maxmemory-policy") == {"": "noeviction"}


async def test_calls_follow_the_primary_that_sentinel_chooses(pair: WatchedPair) -> None:
    await adds_again(RedisAccess(pair.url()), pair)


async def test_a_primary_that_comes_back_as_a_replica_is_not_written_to(pair: WatchedPair) -> None:
    async with connected_store(pair.url(), wait=False) as store:
        await store.load_functions(LIBRARY)
        assert await store.fcall("add", ["count"], [1]) == 1
        first = pair.primary
        first.pause()
        await until(lambda: pair.primary is not first, what="another primary")
        first.resume()
        await until(partial(is_replica, first), what="it has become a replica")

        async def answered() -> bool:
            try:
                await store.fcall("add", ["other"], [1])
            except Unreachable:
                return False
            return True

        await until(answered, what="the new primary answers")
        assert pair.primary.command("EXISTS", "other") == 1


async def test_a_sentinel_that_is_gone_is_passed_over(pair: WatchedPair) -> None:
    pair.sentinels[0].kill()
    async with connected_store(pair.url(), wait=False) as store:
        assert await store.client.ping()


async def test_everything_is_encrypted_and_shows_a_certificate(tmp_path: Path) -> None:
    binary = shutil.which("redis-server")
    if binary is None:
        pytest.skip("Debian's redis-server, which has TLS, is not installed")
    authority = Authority(tmp_path)
    issued = authority.issue("127.0.0.1")
    files = Files(authority.file, issued.certificate, issued.key)
    with watched_pair(Path(binary), files) as pair:
        url = pair.url("rediss+sentinel")
        await adds_again(RedisAccess(url, files.ca, files.certificate, files.key), pair)
        with pytest.raises(Unreachable):
            async with connected_store(RedisAccess(url, files.ca), wait=False):
                pass


async def test_a_wrong_password_or_name_says_so_without_the_password(pair: WatchedPair) -> None:
    wrong = pair.url().replace("of-the-servers", "wrong-one")
    with pytest.raises(AccessDenied) as refused:
        async with connected_store(wrong, wait=False):
            pass
    assert "wrong-one" not in str(refused.value)
    with pytest.raises(Unreachable, match="watches no primary 'other'"):
        async with connected_store(pair.url().replace(f"/{NAME}", "/other"), wait=False):
            pass
    with pytest.raises(AccessDenied, match="Sentinel") as refused:
        async with connected_store(pair.url().replace(SENTINEL_PASSWORD, "wrong-one"), wait=False):
            pass
    assert "wrong-one" not in str(refused.value)


@pytest.mark.parametrize(
    ("url", "parsed"),
    [
        ("redis+sentinel://a/m", SentinelUrl(False, (("a", 26379),), "m")),
        ("redis+sentinel://a:1,[::1]:2/m/3", SentinelUrl(False, (("a", 1), ("::1", 2)), "m", 3)),
        ("rediss+sentinel://u:p%40@a/m", SentinelUrl(True, (("a", 26379),), "m", 0, "u", "p@")),
    ],
)
def test_a_url_names_the_sentinels_and_the_primary(url: str, parsed: SentinelUrl) -> None:
    assert SentinelUrl.parse(url) == parsed


@pytest.mark.parametrize(
    "url",
    [
        "redis+sentinel://a:26379",
        "redis+sentinel:///m",
        "redis+sentinel://a:x/m",
        "redis+sentinel://a,/m",
        "redis+sentinel://a/m/first",
        "redis+sentinel://a/m?password=p",
    ],
)
def test_a_url_without_one_of_them_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="expected redis"):
        SentinelUrl.parse(url)


def test_urls_are_shown_without_secrets() -> None:
    shown = redact_url("redis+sentinel://u:p,w@a:1,b:2/m/0?sentinel_password=q")
    assert shown == "redis+sentinel://u:***@a:1,b:2/m/0?***"
