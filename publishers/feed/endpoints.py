"""Addresses of an engine's ZMQ sockets (pure)."""

from kvatlas.errors import SettingsError


def endpoint_of_rank(endpoint: str, dp_rank: int | None) -> str:
    """The endpoint of one data-parallel rank, according to the rule of vLLM and SGLang: the port plus the rank.

    Raises SettingsError if the endpoint has no port to add to.
    """
    if not dp_rank:
        return endpoint
    if endpoint.startswith("inproc://"):
        return f"{endpoint}_dp{dp_rank}"
    address, colon, port = endpoint.rpartition(":")
    if not endpoint.startswith("tcp://") or not colon or not port.isdigit():
        raise SettingsError(
            f"endpoint {endpoint!r} with rank {dp_rank}; expected tcp://host:port, whose port counts up"
        )
    if int(port) + dp_rank > 65535:
        raise SettingsError(f"endpoint {endpoint!r} with rank {dp_rank}; expected a port of at most 65535")
    return f"{address}:{int(port) + dp_rank}"


def to_connect(endpoint: str) -> str:
    """An address to connect to on this machine, for an endpoint that an engine binds, perhaps on all its interfaces."""
    for wildcard in ("tcp://*:", "tcp://0.0.0.0:", "tcp://[::]:"):
        if endpoint.startswith(wildcard):
            return "tcp://127.0.0.1:" + endpoint.removeprefix(wildcard)
    return endpoint
