"""Secrets in an address are never shown, even if the address is mistyped."""

import string
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvatlas.bus.access import NatsAccess
from kvatlas.errors import KvatlasError, SettingsError
from kvatlas.redaction import redact_url
from kvatlas.settings import PublishSettings, Settings
from kvatlas.store.access import RedisAccess
from kvatlas.store.connection import _client
from kvatlas_cli.auth.secret_files import login_url

SECRETS = st.text(string.ascii_letters + string.digits + "/?#@:,%&=[] ", max_size=12).map(lambda text: f"s3{text}cr3t")
SCHEMES = st.sampled_from(["redis", "rediss", "nats", "tls", "redis+cluster", "http", "ws", "nts", "redis:"])
FORMS = st.sampled_from(
    [
        "{scheme}://user:{secret}@host:6379/0",
        "{scheme}://:{secret}@host:6379",
        "{scheme}://{token}@host:4222",
        "{scheme}://host:6379/0?password={secret}",
        "{scheme}://host:6379?db=1&password={secret}&x=1",
        "{scheme}://u:p@host:6379?password={secret}",
        "{scheme}://a:4222,{scheme}://user:{secret}@b:4222",
        "{scheme}:/user:{secret}@host:6379",
        "{scheme}:user:{secret}@host",
        "user:{secret}@host:6379",
        "{scheme}://user:{without_at}host:6379",
        "{scheme}://user:{secret}@",
        "{scheme}//user:{secret}@host",
        "{scheme}://user:{secret}@host:port",
        "{scheme}://user:{secret}@[::1",
        "{scheme}://user:{secret}@host:6379/first",
    ]
)


def fill(form: str, scheme: str, secret: str) -> str:
    """The form with the secret in it. A token has no colon; otherwise it is a user and a password. A form without an @ gets
    none from the secret."""
    return form.format(scheme=scheme, secret=secret, token=secret.replace(":", ""), without_at=secret.replace("@", ""))


def shows(text: str) -> bool:
    """True if the beginning or the end of a secret is in the text."""
    return "s3" in text or "cr3t" in text


@given(SCHEMES, FORMS, SECRETS)
def test_a_shown_address_has_no_part_of_a_secret(scheme: str, form: str, secret: str) -> None:
    assert not shows(redact_url(fill(form, scheme, secret)))


def error_of(call: Callable[[], object]) -> str:
    """The text of what the call raises; empty if it raises nothing."""
    try:
        call()
    except KvatlasError as error:
        return str(error)
    return ""


@settings(max_examples=40)
@given(SCHEMES, FORMS, SECRETS)
def test_no_error_of_settings_or_connections_has_a_part_of_a_secret(scheme: str, form: str, secret: str) -> None:
    url = fill(form, scheme, secret)
    publish = {"engine": "vllm", "worker_id": "w", "model_id": "m", "endpoint": "tcp://h:1"}
    texts = [NatsAccess(url).name, RedisAccess(url).name, error_of(lambda: _client(RedisAccess(url)))]
    for name in ("nats_url", "redis_url", "worker_id", "log_level", "partitions", "engine_url", "advertise_url"):
        texts.append(error_of(partial(PublishSettings.load, **{**publish, name: url})))
    assert not [text for text in texts if shows(text)]


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://127.0.0.1:6379/0", "redis://127.0.0.1:6379/0"),
        ("tls://a.b:4222,tls://c:4222", "tls://a.b:4222,tls://c:4222"),
        ("redis://router:pw@[::1]:6379", "redis://router:***@[::1]:6379"),
        ("nats://token@h:1", "nats://***@h:1"),
        ("redis://h:1/0?password=x", "redis://h:1/0?***"),
        ("unix:///run/redis.sock", "unix:///run/redis.sock"),
        ("redis://h:1/first", "redis://h:1/***"),
    ],
)
def test_what_is_no_secret_is_shown(url: str, shown: str) -> None:
    assert redact_url(url) == shown


def test_urls_come_from_files_so_that_no_process_list_has_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "indexer.redis-url"
    file.write_text("redis://indexer:s3cr3t@host:6379\n")
    assert Settings.load(redis_url_file=str(file)).redis.url == "redis://indexer:s3cr3t@host:6379"
    monkeypatch.setenv("KVATLAS_REDIS_URL_FILE", str(file))
    assert Settings.load().redis.url == "redis://indexer:s3cr3t@host:6379"
    assert Settings.load(redis_url="redis://flag").redis.url == "redis://flag", "a flag wins over a variable"
    monkeypatch.setenv("KVATLAS_REDIS_URL", "redis://variable")
    with pytest.raises(SettingsError, match="both given"):
        Settings.load()


def test_a_file_that_cannot_be_used_is_told_in_one_line_without_what_it_holds(tmp_path: Path) -> None:
    file = tmp_path / "url"
    for text, line in ((None, "can't read .*: No such file"), ("", "is empty"), ("s3cr3t", "expected a URL")):
        if text is not None:
            file.write_text(text)
        with pytest.raises(SettingsError, match=line) as raised:
            Settings.load(nats_url_file=str(file))
        assert "cr3t" not in str(raised.value)


def test_a_login_survives_every_character() -> None:
    assert (
        login_url("redis://old:pw@h:1/0,redis://i:2", "u", "a/b@c")
        == "redis://u:a%2Fb%40c@h:1/0,redis://u:a%2Fb%40c@i:2"
    )
