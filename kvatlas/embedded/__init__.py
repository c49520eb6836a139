"""Embedded servers: a real NATS and a real Valkey of one's own, for a machine with nothing running.

    async with nats_server() as nats, valkey_server() as valkey:
        ...  # nats.url, valkey.url

Invariants:
- Nothing listens beyond loopback.
- No server outlives the process that started it, even if that is killed with SIGKILL (Linux).
- A port that kvatlas chose stays a server's own over `restart()`; so does its data.
- Temporary data of an owner that was killed is removed by the next one.
- Neither disk nor memory is taken without a limit.
"""

from kvatlas.embedded.async_servers import EmbeddedCluster, EmbeddedServer, nats_server, valkey_cluster, valkey_server
from kvatlas.embedded.child_process import child_command, spawn_child
from kvatlas.embedded.server_process import EmbeddedServerError, ServerProcess

__all__ = [
    "EmbeddedCluster",
    "EmbeddedServer",
    "EmbeddedServerError",
    "ServerProcess",
    "child_command",
    "nats_server",
    "spawn_child",
    "valkey_cluster",
    "valkey_server",
]
