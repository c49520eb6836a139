"""Types of settings fields. Values arrive as text; a wrong one is refused with a phrase that begins with `expected`."""

import re
from collections.abc import Callable
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_settings import NoDecode

from kvatlas.addresses import check_origin
from kvatlas.blocks.tiers import Tier, parse_tier
from kvatlas.errors import InvalidValue
from kvatlas.identity import check_worker_id
from kvatlas.store.access import CLUSTER_SCHEMES, split_urls
from kvatlas.store.sentinel_url import SENTINEL_SCHEMES, SentinelUrl
from kvatlas.validation import Name as Name
from kvatlas.validation import Text, Url

NATS_SCHEMES = ("nats", "tls", "ws", "wss")
REDIS_SCHEMES = ("redis", "rediss", "unix", *CLUSTER_SCHEMES, *SENTINEL_SCHEMES)
ZMQ_SCHEMES = ("tcp", "ipc", "inproc")
HTTP_SCHEMES = ("http", "https")
MAX_PARTITIONS = 4_096
"""Maximum number of partitions: each has a lease and a reader of its own."""
MAX_SECONDS = 10 * 365 * 86_400


def _url(*schemes: str, port: bool = False) -> AfterValidator:
    """`port`: True if a tcp:// URL must have a port."""
    return AfterValidator(_url_check(*schemes, port=port))


def _url_check(*schemes: str, port: bool = False) -> Callable[[str], str]:
    expected = f"expected a URL that begins with {' or '.join(f'{scheme}://' for scheme in schemes)}"

    def check(value: str) -> str:
        try:
            parts = urlsplit(value)
            number = parts.port if parts.scheme != "unix" and "*" not in value else None
        except ValueError as error:
            raise ValueError(f"{expected}, with a port from 0 to 65535") from error
        if parts.scheme not in schemes or not (parts.netloc or parts.path.strip("/")):
            raise ValueError(expected)
        if port and parts.scheme == "tcp" and number is None and not value.rpartition(":")[2].isdigit():
            raise ValueError(f"{expected}, and a port")
        return value

    return check


_check_nats_url = _url_check(*NATS_SCHEMES)


def _check_nats_urls(value: str) -> str:
    for one in value.split(","):
        _check_nats_url(one.strip())
    return value


def _check_engine_url(value: str) -> str:
    """Routers send requests to this address, so a path or query in the URL would allow a publisher to choose the request."""
    try:
        return check_origin(value)
    except InvalidValue as error:
        raise ValueError("expected http:// or https://, a host and a port, and nothing else") from error


def _check_inbox(value: str) -> str:
    if not re.fullmatch(r"_INBOX(\.[A-Za-z0-9_-]{1,64}){0,4}", value):
        raise ValueError("expected _INBOX, or _INBOX. and a name")
    return value


_check_redis_url = _url_check(*REDIS_SCHEMES)


def _check_redis_urls(value: str) -> str:
    """Redis' own client would use database 0 for a path that is not a number."""
    if value.partition("://")[0] in SENTINEL_SCHEMES:
        SentinelUrl.parse(value)
        return value
    for one in split_urls(value):
        parts = urlsplit(_check_redis_url(one))
        if parts.scheme != "unix" and not re.fullmatch(r"/?[0-9]{0,9}", parts.path):
            raise ValueError("expected nothing or a database number after the port")
    return value


def _check_worker_id(value: str) -> str:
    """Accept the names of pods: dots, which a NATS subject can't contain, become underscores. Pod names never contain
    underscores, so two pods always get two different names."""
    try:
        return check_worker_id(value.replace(".", "_"))
    except InvalidValue as error:
        raise ValueError("expected 1 to 64 characters from A-Z a-z 0-9 _ - . (a dot becomes _)") from error


def _check_path(value: str) -> str:
    if not re.fullmatch(r"/[A-Za-z0-9._~:@!$&'()+;=%/-]*\*?", value):
        raise ValueError("expected paths that begin with /, without a query; a * only at the end")
    return value


def _split_commas(value: Any) -> Any:
    return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value


def _parse_tiers(value: Any) -> Any:
    try:
        return tuple(parse_tier(name) for name in _split_commas(value)) if isinstance(value, str) else value
    except InvalidValue as error:
        raise ValueError(
            f"expected names of tiers, separated by commas: {', '.join(tier.label for tier in Tier)}"
        ) from error


def _split_labels(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    pairs = [part.partition("=") for part in value.split(",") if part.strip()]
    if any(not separator or not name.strip() for name, separator, _ in pairs):
        raise ValueError("expected name=value pairs, separated by commas")
    return {name.strip(): text.strip() for name, _, text in pairs}


NatsUrl = Annotated[str, AfterValidator(_check_nats_urls)]
RedisUrl = Annotated[str, AfterValidator(_check_redis_urls)]
ZmqEndpoint = Annotated[str, _url(*ZMQ_SCHEMES, port=True)]
HttpUrl = Annotated[Url, _url(*HTTP_SCHEMES)]
EngineUrl = Annotated[str, AfterValidator(_check_engine_url)]
Inbox = Annotated[str, AfterValidator(_check_inbox)]
WorkerId = Annotated[str, AfterValidator(_check_worker_id)]
GroupList = Annotated[tuple[Annotated[int, Field(ge=0, le=1023)], ...], NoDecode, BeforeValidator(_split_commas)]
CommaList = Annotated[tuple[Text, ...], NoDecode, BeforeValidator(_split_commas)]
PathList = Annotated[tuple[Annotated[Text, AfterValidator(_check_path)], ...], NoDecode, BeforeValidator(_split_commas)]
Labels = Annotated[dict[Text, Text], NoDecode, BeforeValidator(_split_labels)]
TierList = Annotated[tuple[Tier, ...], NoDecode, BeforeValidator(_parse_tiers), Field(max_length=len(Tier))]
Port = Annotated[int, Field(ge=0, le=65535)]
PartitionCount = Annotated[int, Field(ge=1, le=MAX_PARTITIONS)]
Seconds = Annotated[int, Field(ge=1, le=MAX_SECONDS)]
