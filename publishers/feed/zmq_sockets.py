"""ZMQ sockets that work on IPv4 and IPv6 and don't delay the process's exit."""

from typing import Any, TypeVar

import zmq

S = TypeVar("S", bound="zmq.Socket[Any]")


def open_socket(context: "zmq.Context[S]", kind: int) -> S:
    """Open a socket that can connect to and bind addresses of both families."""
    socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.IPV6, 1)
    return socket
