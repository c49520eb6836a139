"""The Secrets of a fleet with users, as the commands of docs/kubernetes.md make them."""

import base64
import os
import subprocess
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from kvatlas_cli import main
from tests.deployment.tools import ROOT, objects, tool

CREATE_SECRETS = ROOT / "k8s/create-secrets"


@cache
def secrets() -> dict[str, dict[str, str]]:
    """What `create-secrets` prints, by name, decoded."""
    with TemporaryDirectory() as folder:
        users = Path(folder) / "fleet.toml"
        users.write_text('[publishers.publisher]\nworkers = ["*"]\n')
        flags = ("--publishers", str(users))
        write_users(Path(folder), "tls://kvatlas-nats:4222", "rediss://kvatlas-valkey:6379", *flags)
        return printed(Path(folder))


def write_users(folder: Path, nats_url: str, redis_url: str, *flags: str) -> None:
    """Run `kvatlas auth` for both servers."""
    for words in (["nats", "--nats-url", nats_url, *flags], ["redis", "--redis-url", redis_url]):
        assert main.run(["auth", *words, "--out", str(folder)]) == 0


def printed(folder: Path, *words: str) -> dict[str, dict[str, str]]:
    environment = {**os.environ, "PATH": f"{tool('kubectl').parent}:{os.environ['PATH']}", "KUBECONFIG": os.devnull}
    done = subprocess.run(
        [CREATE_SECRETS, str(folder), *words], capture_output=True, text=True, timeout=60, check=True, env=environment
    )
    return {
        one["metadata"]["name"]: {key: base64.b64decode(value).decode() for key, value in one["data"].items()}
        for one in objects(done.stdout)
    }
