"""Embedded servers: real NATS and Valkey servers for a machine that runs neither.

    async with nats_server() as nats, valkey_server() as valkey:
        ...  # nats.url, valkey.url

Invariants:
- They listen on loopback only.
- No server outlives the process that started it, even if that process is killed with SIGKILL (Linux).
- A server keeps its port and its data when it is restarted with `restart()`.
- The temporary data of a process that was killed is removed by the next process that starts a server.
- The servers' use of disk space and memory is limited.
"""

from kvatlas.embedded.async_servers import EmbeddedServer, nats_server, valkey_server
from kvatlas.embedded.child_process import child_command, spawn_child
from kvatlas.embedded.server_process import EmbeddedServerError, ServerProcess

__all__ = [
    "EmbeddedServer",
    "EmbeddedServerError",
    "ServerProcess",
    "child_command",
    "nats_server",
    "spawn_child",
    "valkey_server",
]
