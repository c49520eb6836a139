"""Each NATS user on a real server can speak for its own workers and read its own answers, and nothing else."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme

from kvatlas.bus.access import NatsAccess
from kvatlas.bus.connection import connect_nats
from kvatlas.bus.stream import StreamSettings, ensure_stream, stream_info
from kvatlas.bus.subjects import ALL_ALIVE, ALL_GRANTS, alive_subject, control_subject, events_subject, grant_subject
from kvatlas.embedded.nats import NatsProcess
from kvatlas.errors import AccessDenied, InvalidValue
from kvatlas.fleet.identities import Identities, Identity, TenantRefused, parse_identities
from kvatlas.identity import Scope
from kvatlas_cli import main
from kvatlas_cli.auth.nats_users import nats_permissions
from tests.eventually import until
from tests.kvatlas_cli.auth.guarded_servers import GuardedServers, connected, write

pytestmark = pytest.mark.anyio

PARTITIONS = 64
MEMORY = StreamSettings(storage="memory", max_bytes=1 << 20)


@pytest.mark.parametrize(
    "subject",
    [
        events_subject("code", PARTITIONS),
        alive_subject("code"),
        control_subject("chat-0"),
        "$JS.API.STREAM.DELETE.KVATLAS_EVENTS",
        "$JS.API.STREAM.PURGE.KVATLAS_EVENTS",
        "$JS.API.CONSUMER.CREATE.KVATLAS_EVENTS.x",
        "_INBOX.indexer.x",
        "_INBOX.code.x",
        "_INBOX.chat.x",
        "kvatlas.dead.1.w",
        "kvatlas.store.pool.code",
    ],
)
async def test_a_publisher_may_not_write(servers: GuardedServers, subject: str) -> None:
    async with servers.connected("chat") as (client, refused):
        await client.publish(subject, b"")
        await until(lambda: refused, what="the refusal")
        assert "permissions violation" in refused[0] and subject.lower() in refused[0]


@pytest.mark.parametrize(
    ("user", "subject"),
    [
        ("chat", "_INBOX.>"),
        ("chat", "_INBOX.code.>"),
        ("chat", "_INBOX.indexer.>"),
        ("chat", "kvatlas.events.>"),
        ("chat", alive_subject("code")),
        ("chat", control_subject("code")),
        ("chat", "kvatlas.grant.*"),
        ("chat", "kvatlas.store.pool.*"),
        ("indexer", "_INBOX.chat.>"),
        ("indexer", "kvatlas.control.*"),
        ("auditor", "kvatlas.events.>"),
        ("auditor", "_INBOX.indexer.>"),
        ("auditor", "kvatlas.control.*"),
    ],
)
async def test_a_user_may_not_read(servers: GuardedServers, user: str, subject: str) -> None:
    async with servers.connected(user) as (client, refused):
        await client.subscribe(subject)
        await until(lambda: refused, what="the refusal")
        assert "permissions violation for subscription" in refused[0]


@pytest.mark.parametrize(
    ("user", "subject"),
    [
        ("indexer", "$JS.API.STREAM.DELETE.KVATLAS_EVENTS"),
        ("indexer", "$JS.API.STREAM.PURGE.KVATLAS_EVENTS"),
        ("indexer", events_subject("w", PARTITIONS)),
        ("indexer", alive_subject("w")),
        ("auditor", events_subject("w", PARTITIONS)),
        ("auditor", alive_subject("w")),
        ("auditor", "$JS.API.STREAM.CREATE.KVATLAS_EVENTS"),
        ("auditor", "$JS.API.STREAM.DELETE.KVATLAS_EVENTS"),
        ("auditor", "$JS.API.CONSUMER.CREATE.KVATLAS_EVENTS.x"),
    ],
)
async def test_an_indexer_or_auditor_may_not_write(servers: GuardedServers, user: str, subject: str) -> None:
    async with servers.connected(user) as (client, refused):
        await client.publish(subject, b"")
        await until(lambda: refused, what="the refusal")
        assert subject.lower() in refused[0]


async def test_indexer_auditor_and_publisher_may_send_each_other_requests(servers: GuardedServers) -> None:
    async with (
        servers.connected("indexer") as (indexer, no_indexer),
        servers.connected("auditor") as (auditor, no_auditor),
        servers.connected("chat") as (publisher, no_publisher),
    ):
        await ensure_stream(indexer, MEMORY)
        answer = json.loads((await publisher.request(events_subject("w", PARTITIONS), b"x", timeout=60)).data)
        assert answer["stream"] == "KVATLAS_EVENTS"
        assert (await stream_info(auditor)).last_seq >= 1
        alive = await indexer.subscribe(ALL_ALIVE)
        grants = await indexer.subscribe(ALL_GRANTS)
        control = await publisher.subscribe(control_subject("w"))
        for client in (indexer, publisher):
            await client.flush(5)
        await publisher.publish(alive_subject("w"), b"beat")
        assert (await alive.next_msg(5)).data == b"beat"
        for asker, subject, answers in (
            (indexer, control_subject("w"), control),
            (auditor, control_subject("w"), control),
            (publisher, grant_subject("w", PARTITIONS), grants),
        ):
            inbox = asker.new_inbox()
            replies = await asker.subscribe(inbox)
            await asker.publish(subject, b"?", reply=inbox)
            await (await answers.next_msg(5)).respond(b"!")
            assert (await replies.next_msg(5)).data == b"!"
        assert no_indexer == no_auditor == no_publisher == []


async def test_a_user_with_a_wrong_password_is_refused_in_one_line_without_it(servers: GuardedServers) -> None:
    url = servers.nats_url("chat").replace("chat:", "chat:wrong")
    with pytest.raises(AccessDenied) as raised:
        await connect_nats(url, name="test", wait=True)
    assert "wrong" not in str(raised.value) and "chat:***@127.0.0.1" in str(raised.value)


async def test_of_several_servers_any_is_enough(servers: GuardedServers) -> None:
    login = servers.nats_url("chat").rpartition("@")[0]
    async with connected(NatsAccess(f"{login}@127.0.0.1:1,{servers.nats.url}")) as (client, _):
        assert client.is_connected


@pytest.fixture(scope="module")
def nkey_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[NatsProcess, Path]]:
    out = tmp_path_factory.mktemp("nkeys")
    write("nats", "--out", str(out), "--method", "nkey")
    with NatsProcess(config=(out / "nats-users.conf").read_text()) as server:
        yield server, out


async def test_users_with_nkeys_connect_and_are_bound_to_their_subjects(nkey_server: tuple[NatsProcess, Path]) -> None:
    server, out = nkey_server
    access = NatsAccess(server.url, nkey_file=out / "publisher.nkey", inbox="_INBOX.publisher")
    async with connected(access) as (client, refused):
        await client.publish("$JS.API.STREAM.DELETE.KVATLAS_EVENTS", b"")
        await until(lambda: refused, what="the refusal")
    other = NatsAccess(server.url, nkey_file=out / "nats-users.conf")
    with pytest.raises(AccessDenied, match="expected the seed of an NKey"):
        await connect_nats(other, name="test", wait=False)
    with pytest.raises(AccessDenied, match=r"none\.nkey: No such file"):
        await connect_nats(NatsAccess(server.url, nkey_file=out / "none.nkey"), name="test", wait=True)


async def test_users_with_certificates_connect_and_are_bound_to_their_subjects(tmp_path: Path) -> None:
    authority = trustme.CA()
    write("nats", "--out", str(tmp_path), "--method", "certificate")
    files = {name: tmp_path / f"{name}.pem" for name in ("ca", "server", "publisher", "stranger")}
    authority.cert_pem.write_to_path(files["ca"])
    for name, host in (("server", "127.0.0.1"), ("publisher", "publisher"), ("stranger", "stranger")):
        authority.issue_cert(host).private_key_and_cert_chain_pem.write_to_path(files[name])
    tls = {"cert_file": files["server"], "key_file": files["server"], "ca_file": files["ca"]}
    lines = "\n".join(f'{key}: "{file}"' for key, file in tls.items())
    config = f"tls {{\n{lines}\nverify_and_map: true\n}}\n" + (tmp_path / "nats-users.conf").read_text()

    def access(user: str) -> NatsAccess:
        file = files[user]
        return NatsAccess(url, ca_file=files["ca"], cert_file=file, key_file=file, inbox=f"_INBOX.{user}")

    with NatsProcess(config=config) as server:
        url = server.url.replace("nats:", "tls:")
        async with connected(access("publisher")) as (client, refused):
            await client.publish("$JS.API.STREAM.DELETE.KVATLAS_EVENTS", b"")
            await until(lambda: refused, what="the refusal")
        with pytest.raises(AccessDenied):
            await connect_nats(access("stranger"), name="test", wait=False)


def test_a_publisher_of_all_workers_may_not_speak_for_another_publishers() -> None:
    users = nats_permissions(Identities({"all": Identity(workers=("*",)), "chat": Identity(workers=("w-{0..1}",))}))
    assert "kvatlas.events.*.*" in users["all"].publish and "kvatlas.events.*.w-1" in users["all"].denied
    assert not users["chat"].denied


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("[publishers.a]\nworkers = []\n", "publishers.a.workers is []; expected a non-empty list"),
        ('[publishers.a]\nworkers = ["a.b"]\n', "worker id 'a.b'; expected 1 to 64 characters from A-Z a-z 0-9 _ -"),
        ('[publishers.a]\nworkers = ["w"]\nhosts = []\n', "publishers.a.hosts is []; there is no such field"),
        ('[publishers.a]\nworkers = ["w"]\naddresses = ["a b"]\n', "address 'a b'; expected a network"),
        (
            '[publishers.a]\nworkers = ["w"]\n[publishers.b]\nworkers = ["w"]\n',
            "publishers a and b both claim worker w",
        ),
        ('[publishers.a]\nworkers = ["w{9..1}"]\n', "the range is empty"),
        ('[publishers.a]\nworkers = ["w{0..999999}"]\n', "more than 4096 workers"),
        (
            '[publishers.indexer]\nworkers = ["w"]\n',
            "publisher indexer: this name is reserved for kvatlas' own NATS user",
        ),
        ("publishers = 1", "publishers is missing"),
        ("[", "fleet.toml"),
    ],
)
def test_a_wrong_description_of_publishers_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, line: str
) -> None:
    file = tmp_path / "fleet.toml"
    file.write_text(text)
    assert main.run(["auth", "nats", "--out", str(tmp_path / "out"), "--publishers", str(file)]) in (1, 2)
    error = capsys.readouterr().err
    assert line in error and error.count("\n") == 1


def test_identities_name_what_they_refuse() -> None:
    identities = parse_identities({"publishers": {"a": {"workers": ["w"], "tenants": ["acme"]}}})
    identities.check_scope("w", Scope("m", "m", None, "acme"))
    with pytest.raises(TenantRefused, match="worker w: publisher a may not speak for its tenant") as refused:
        identities.check_scope("w", Scope("m", "m"))
    assert refused.value.tenant_id == "default"
    with pytest.raises(InvalidValue, match="worker x: no publisher may speak for it"):
        identities.check_scope("x", Scope("m", "m"))


def test_written_secrets_are_kept_and_read_by_their_owner_alone(tmp_path: Path) -> None:
    out = tmp_path / "auth"
    write("nats", "--out", str(out))
    before = {file.name: file.read_text() for file in out.glob("*.nats-url")}
    write("nats", "--out", str(out), "--nats-url", "tls://a:4222,tls://b:4222")
    for name, text in before.items():
        login = text.partition("//")[2].partition("@")[0]
        assert (out / name).read_text() == f"tls://{login}@a:4222,tls://{login}@b:4222\n"
    assert {file.stat().st_mode & 0o777 for file in out.iterdir()} == {0o600}


def test_a_router_has_no_user_of_nats_unless_it_is_asked_for() -> None:
    assert set(nats_permissions()) == {"indexer", "auditor", "publisher"}
    assert set(nats_permissions(with_routers=True)) == {"indexer", "auditor", "publisher", "router"}


def test_a_router_may_only_ask_about_the_stream_and_read_it() -> None:
    router = nats_permissions(with_routers=True)["router"]
    api = [subject for subject in router.publish if subject.startswith("$JS.API.")]
    assert {subject.split(".")[2] for subject in api} == {"STREAM", "CONSUMER"}
    assert all("KVATLAS_EVENTS" in subject for subject in api)
    assert set(router.publish) - set(api) == {"kvatlas.hashes.*"}
    assert not any(
        call in subject
        for subject in router.publish
        for call in (".PURGE", ".UPDATE", "STREAM.DELETE", "STREAM.CREATE")
    )
    assert router.subscribe == ["_INBOX.router.>"] and not router.responds


def test_identities_without_a_limit_are_those_that_earlier_versions_read(tmp_path: Path) -> None:
    """A component that is rolled back refuses a field that it does not know."""
    file, out = tmp_path / "fleet.toml", tmp_path / "out"
    file.write_text('[publishers.a]\nworkers = ["a"]\n[publishers.b]\nworkers = ["b"]\nblocks = 5\n')
    assert main.run(["auth", "nats", "--out", str(out), "--publishers", str(file)]) == 0
    written = json.loads((out / "identities.json").read_text())["publishers"]
    assert "blocks" not in written["a"] and written["b"]["blocks"] == 5
