"""Passwords in the servers' addresses of running processes, whose servers go away, appear in no log line and on no status
page."""

import re
import subprocess
from contextlib import ExitStack
from pathlib import Path

import httpx

from kvatlas.embedded.free_port import free_port
from kvatlas.embedded.nats import NatsProcess
from kvatlas.embedded.valkey import ValkeyProcess
from tests.end_to_end.processes import environment, kvatlas_command
from tests.eventually import until_sync
from tests.http_client import trusted

SECRET = "s3cr3t-of-a-server"
WORKER = ["--engine", "open", "--worker-id", "w", "--model-id", "m"]
STORED = b'{"engine_id": "e", "events": [{"type": "block_stored", "block_hashes": [1], "token_ids": [1, 2], "block_size": 2}]}'
"""Something to publish: a publisher without events does not miss NATS."""
AWAY = re.compile("NATS is not connected|Connection (refused|closed)")
COMMANDS = {
    "indexer": ["--member-id", "i1", "--status-port"],
    "publish": [*WORKER, "--status-port"],
    "router": ["--tokenizer", "none", "--port"],
}


def test_processes_show_no_password_of_their_servers(tmp_path: Path) -> None:
    with NatsProcess(user="someone", password=SECRET) as nats, ValkeyProcess(password=SECRET) as valkey:
        assert SECRET in nats.url and SECRET in valkey.url
        variables = environment(KVATLAS_NATS_URL=nats.url, KVATLAS_REDIS_URL=valkey.url)
        ports: dict[str, int] = {}
        shown = ""
        with ExitStack() as stack:
            for command, words in COMMANDS.items():
                port = ports[command] = free_port()
                log = stack.enter_context((tmp_path / command).open("w"))
                process = subprocess.Popen(
                    kvatlas_command(command, *words, str(port), "--log-level", "debug"),
                    env=variables,
                    stdout=log,
                    stderr=log,
                )
                stack.callback(process.wait, timeout=30)
                stack.callback(process.terminate)
            for command, port in ports.items():
                shown += until_sync(lambda port=port: _status(port), deadline_s=60, what=f"{command} answers")  # type: ignore[misc]
            nats.stop()
            valkey.stop()
            httpx.post(
                f"http://127.0.0.1:{ports['publish']}/events", content=STORED, trust_env=False
            ).raise_for_status()
            for command, port in ports.items():

                def says_so(command: str = command) -> bool:
                    return AWAY.search((tmp_path / command).read_text()) is not None

                until_sync(says_so, deadline_s=60, what=f"{command} logs that a server is away")
                shown += _status(port)
    shown += "".join((tmp_path / command).read_text() for command in COMMANDS)
    assert SECRET[:6] not in shown


def _status(port: int) -> str:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/status", trust_env=False, verify=trusted()).text
    except httpx.HTTPError:
        return ""
