"""ZMQ sockets: each of ours works on IPv4 and IPv6, and none holds up its process' end."""

from typing import Any, TypeVar

import zmq

S = TypeVar("S", bound="zmq.Socket[Any]")


def open_socket(context: "zmq.Context[S]", kind: int) -> S:
    """A socket that connects to, and binds, addresses of both families."""
    socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.IPV6, 1)
    return socket
