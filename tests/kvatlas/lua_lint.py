"""`python -m tests.kvatlas.lua_lint`: luacheck on each function library, as the server compiles it.

Only there does luacheck see which names a file gets from earlier ones, and which of its own are unused.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path

from kvatlas.fleet_store.fleet_store import FLEET_LIBRARY
from kvatlas.index.redis.index_functions import INDEX_LIBRARY
from kvatlas.reservations.redis_calls import POOL_LIBRARY
from kvatlas.store.function_library import FunctionLibrary

LIBRARIES = (INDEX_LIBRARY, POOL_LIBRARY, FLEET_LIBRARY)
MISSING = """\
lint: Lua is not checked, since luacheck is missing. On Debian and Ubuntu: apt install lua-check
      elsewhere: luarocks install luacheck"""

_FINDING = re.compile(r"^stdin:(\d+):(.*)$", re.MULTILINE)


def findings(library: FunctionLibrary, luacheck: str) -> list[str]:
    """Luacheck's findings, each "file:line:column: text". Raises RuntimeError if it fails."""
    code = library.code.replace("#!", "--", 1)
    command = [luacheck, "-", "--codes", "--formatter", "plain"]
    done = subprocess.run(command, input=code, capture_output=True, text=True, check=False, timeout=60)
    if done.returncode > 1:
        raise RuntimeError(f"luacheck: {done.stdout}{done.stderr}")
    file_lines = {}
    for stem in (*library.shared, *library.commands):
        source = library.source(stem).rstrip("\n")
        first = code[: code.index(source)].count("\n") + 1
        path = library.folder.relative_to(Path.cwd()) / f"{stem}.lua"
        file_lines.update({first + i: f"{path}:{i + 1}" for i in range(source.count("\n") + 1)})
    return [
        f"{file_lines[int(line)]}:{what}" for line, what in _FINDING.findall(done.stdout) if int(line) in file_lines
    ]


def main() -> int:
    luacheck = shutil.which("luacheck")
    if luacheck is None:
        print(MISSING, file=sys.stderr)
        return 0
    found = [line for library in LIBRARIES for line in findings(library, luacheck)]
    print("\n".join([*found, f"{len(found)} findings in Lua"]))
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
