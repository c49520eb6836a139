"""Libraries of server-side functions: their code, and calls that load a library if the server does not have it.

The names of libraries and functions end with a tag, which is a hash of the code. Processes of two versions thus each find their
own functions, in whatever order they start. Each process marks its libraries as used. A library that no process has used for a
long time is deleted (`indexer/cleanup/library_expiry.py`).
"""

import logging
import re
from collections.abc import Awaitable, Callable, Sequence
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from time import monotonic, perf_counter
from typing import Any

from redis.exceptions import NoPermissionError, RedisError, ResponseError

from kvatlas.errors import Unreachable
from kvatlas.store.connection import Store
from kvatlas.telemetry import sampled_context, store_span
from kvatlas.telemetry.duration_series import Durations

MARK_EVERY_S = 600.0
USED_FOR_S = 24 * 3600
"""How long a mark lasts; no process that calls functions uses a library without a mark."""

_MISSING = "Function not found"
_TAG_BYTES = 4
_MARK = """
-- mark: a process uses this library. KEYS 1 its mark; ARGV 1 s for which that counts; returns 1
redis.register_function({
  function_name = '%s_mark' .. TAG,
  callback = bounded(function(keys, args)
    redis.call('SET', keys[1], '1', 'EX', args[1])
    return 1
  end),
  flags = { 'allow-oom' },
})"""

_BOUNDS = """
-- Functions bound their own work: callers may send anything, and a function can't be interrupted once it has written.
local MOST_ARGS, MOST_BYTES, MOST_NUMBER = 1024, 65536, 9007199254740991

-- Returns a function that refuses more arguments, or more bytes in all of them, than it may work on. Each limit may be nil.
local function bounded(callback, most_args, most_bytes)
  most_args, most_bytes = most_args or MOST_ARGS, most_bytes or MOST_BYTES
  return function(keys, args)
    local bytes = 0
    for i = 1, math.min(#args, most_args) do
      bytes = bytes + #args[i]
    end
    if #args > most_args or bytes > most_bytes then
      error({ err = string.format('ERR arguments of %d words or %d bytes at most', most_args, most_bytes) })
    end
    return callback(keys, args)
  end
end

-- Returns an argument as a whole number within these bounds; raises an error for anything else.
local function integer(text, least, most)
  local number = tonumber(text)
  if not number or number < least or number > (most or MOST_NUMBER) or number % 1 ~= 0 then
    error({ err = 'ERR argument: expected a whole number from ' .. least .. ' to ' .. (most or MOST_NUMBER) })
  end
  return number
end
"""
_TOP_LEVEL = re.compile(r"^local (?:function )?(\w+(?:, \w+)*)", re.MULTILINE)
_WORD = re.compile(r"[A-Za-z_]\w*")
_COMMENT = re.compile(r"--.*")

log = logging.getLogger("kvatlas.store")
_durations = Durations(
    "store_call",
    ("db.operation.name", "db.stored_procedure.name", "error.type"),
    {"db.system.name": "redis"},
)


class FunctionLibrary:
    """One library, made from a folder of `.lua` files: first those in `shared`, in this order, then the others, each containing
    the one command that it is named after. They register a function under its name plus `TAG`; calls leave out the tag.

    The server compiles the library as one chunk, which may have only 200 locals. Each file therefore becomes a block: the
    top-level names of shared files are exported, and each block begins by declaring, as locals, those earlier exports that it
    mentions.

    If the server does not have a function (because it was never loaded, or was flushed), a call loads the library, which is
    always safe, and then tries again once. All calls raise what `Store.fcall` raises.
    """

    def __init__(self, family: str, folder: Path, shared: Sequence[str]) -> None:
        """`family`: the name of the library without its tag."""
        self.family = family
        self.folder = folder
        self.shared = shared

    @property
    def name(self) -> str:
        return self.family + self._tag

    @cached_property
    def code(self) -> str:
        """The code to load; it begins with the line that names the library."""
        return f"#!lua name={self.name}\nlocal TAG = '{self._tag}'\n{self._body}"

    def function(self, name: str) -> str:
        """The name of the function on the server."""
        return name + self._tag

    @cached_property
    def _tag(self) -> str:
        return "_" + blake2b(self._body.encode(), digest_size=_TAG_BYTES).hexdigest()

    @cached_property
    def _body(self) -> str:
        sources = {stem: self.source(stem) for stem in (*self.shared, *self.commands)}
        mentions = {stem: set(_WORD.findall(_COMMENT.sub("", text))) for stem, text in sources.items()}
        owners: dict[str, str] = {}
        blocks: list[str] = []
        for stem, text in sources.items():
            imports = sorted(mentions.pop(stem) & owners.keys())
            later = set().union(*mentions.values())
            exports = [name for name in _top_level(text) if name in later] if stem in self.shared else []
            block = ["do", *(f"local {name} = {owners[name]}.{name}" for name in imports), text, "end"]
            if exports:
                block.insert(0, f"local {stem}")
                block.insert(-1, f"{stem} = {{ {', '.join(f'{name} = {name}' for name in exports)} }}")
            blocks += block
            if twice := [name for name in exports if name in owners]:
                raise ValueError(f"{self.family}: {stem}.lua redefines names of earlier files: {', '.join(twice)}")
            owners |= dict.fromkeys(exports, stem)
        return "\n".join([_BOUNDS, *blocks, _MARK % self.family])

    @cached_property
    def commands(self) -> list[str]:
        """The files that register a function, ordered by their names."""
        return sorted(path.stem for path in self.folder.glob("*.lua") if path.stem not in self.shared)

    def source(self, stem: str) -> str:
        """The text of one of the library's files."""
        return (self.folder / f"{stem}.lua").read_text()

    async def load(self, store: Store) -> None:
        """See `Store.load_functions`."""
        await store.load_functions(self.code)

    async def prepare(self, store: Store) -> None:
        """Do in advance what would make the first call late: read the code, load it if the server does not have it, and mark it
        as used. If the store fails, the first call does all this and reports the error."""
        try:
            await self._mark(store)
        except (Unreachable, RedisError):
            del store.marked_s[self.name]

    async def call(self, store: Store, function: str, keys: Sequence[str], args: Sequence[Any]) -> Any:
        return await self._call("FCALL", store, store.fcall, function, keys, args)

    async def call_ro(self, store: Store, function: str, keys: Sequence[str], args: Sequence[Any]) -> Any:
        """Like `call`, for a function that does not write anything."""
        return await self._call("FCALL_RO", store, store.fcall_ro, function, keys, args)

    async def call_ro_many(
        self, store: Store, function: str, calls: Sequence[tuple[Sequence[str], Sequence[Any]]]
    ) -> list[Any]:
        """Make several (keys, args) calls to one function that does not write anything: see `Store.fcall_ro_many`."""
        answers: list[Any] = await self._call(
            "FCALL_RO", store, store.fcall_ro_many, function, calls, together=len(calls)
        )
        return answers

    async def _call(
        self,
        operation: str,
        store: Store,
        call: Callable[..., Awaitable[Any]],
        function: str,
        *what: Any,
        together: int = 1,
    ) -> Any:
        """Make a call, or several calls `together`, within a span, and count how long it takes."""
        failure = ""
        with store_span(operation, function, store.attributes, together):
            began = perf_counter()
            try:
                if monotonic() >= store.marked_s.get(self.name, -MARK_EVERY_S) + MARK_EVERY_S:
                    await self._mark(store)
                return await self._call_or_load(store, call, function, *what)
            except Exception as error:
                failure = type(error).__name__
                raise
            finally:
                _durations.add((operation, function, failure), perf_counter() - began, sampled_context())

    async def _mark(self, store: Store) -> None:
        store.marked_s[self.name] = monotonic()
        try:
            await self._call_or_load(store, store.fcall, f"{self.family}_mark", [mark_key(self.name)], [USED_FOR_S])
        except NoPermissionError as error:
            log.debug(
                "%s: this user isn't allowed to mark function library %s as used (%s)", store.name, self.name, error
            )

    async def _call_or_load(self, store: Store, call: Callable[..., Awaitable[Any]], function: str, *what: Any) -> Any:
        try:
            return await call(self.function(function), *what)
        except ResponseError as error:
            if _MISSING not in str(error):
                raise
        try:
            await self.load(store)
        except NoPermissionError as error:
            line = f"it has no function library {self.name}, and this user may not load it; start an indexer of this version"
            raise Unreachable(f"{store.name}: {line}") from error
        return await call(self.function(function), *what)


def _top_level(source: str) -> list[str]:
    """The names that are declared at the top level of a file."""
    return [name for names in _TOP_LEVEL.findall(source) for name in names.split(", ")]


def mark_key(library: str) -> str:
    """The key that marks a library as used; it contains the library's name with its tag."""
    return f"kva:{{fleet}}:library:{library}"


async def read_unmarked(store: Store, families: Sequence[str]) -> list[str]:
    """Those loaded libraries of these families that no process has used for USED_FOR_S. Raises Unreachable or redis' errors."""
    tagged = re.compile(rf"(?:{'|'.join(map(re.escape, families))})_[0-9a-f]{{{2 * _TAG_BYTES}}}")
    names = [name for name in await store.list_libraries() if tagged.fullmatch(name)]
    return [name for name in names if not await store.ask(store.client.exists(mark_key(name)))]
