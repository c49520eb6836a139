"""The commands and their help texts."""

import re
import subprocess
import sys
from importlib import import_module

import pytest
from typer import Typer

from kvatlas.settings import COMMON, OWN, ProcessSettings, Settings, flag_of, variable_of
from kvatlas.version import own_version
from kvatlas_cli.app import COMMANDS, SUMMARIES
from tests.end_to_end.processes import environment
from tests.kvatlas_cli.command_line import callback
from tests.kvatlas_cli.conftest import Cli

EXPECTED_COMMANDS = {
    "up",
    "demo",
    "replay",
    "record",
    "remove",
    "calibrate",
    "indexer",
    "publish",
    "collect",
    "router",
    "epp",
    "simulate-engine",
    "export",
    "locate",
    "children",
    "workers",
    "rates",
    "layout",
    "audit",
    "index-server",
    "usage",
    "auth",
    "doctor",
    "overlap",
    "top",
    "route",
}
WITHOUT_SERVERS = {"demo", "replay", "record", "calibrate", "auth", "simulate-engine"}
WITHOUT_STORE = {"publish", "collect"}
MANY_FLAGS = ("publish", "epp", "router", "indexer", "simulate-engine")


def test_all_commands_exist() -> None:
    assert set(COMMANDS) == EXPECTED_COMMANDS


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_that_names_the_servers_and_their_variables(cli: Cli, command: str) -> None:
    done = cli(command, "--help")
    assert (done.code, done.err) == (0, "")
    assert f"Usage: kvatlas {command}" in done.out
    servers = set() if command in WITHOUT_SERVERS else {"nats_url", "redis_url"}
    for field in servers if command not in WITHOUT_STORE else {"nats_url"}:
        assert flag_of(field) in done.out and variable_of(field) in done.out


@pytest.mark.parametrize("command", MANY_FLAGS)
def test_help_is_in_groups_and_begins_with_the_five_flags_that_people_set_first(cli: Cli, command: str) -> None:
    settings_class: type[ProcessSettings] = callback(command).settings_class  # type: ignore[attr-defined]
    groups = settings_class.group_of_field()
    assert groups.keys() == settings_class.model_fields.keys()
    assert OWN not in groups.values()
    assert list(groups.values())[:6].count(COMMON) == list(groups.values()).count(COMMON) == 5
    headings = [line[:-1] for line in cli(command, "--help").out.splitlines() if re.fullmatch(r"[A-Z].*:", line)]
    assert headings == [*dict.fromkeys(groups.values()), OWN]


def test_the_groups_of_the_help_name_only_flags_that_exist() -> None:
    for command in MANY_FLAGS:
        settings_class: type[ProcessSettings] = callback(command).settings_class  # type: ignore[attr-defined]
        named = {
            name
            for kind in settings_class.__mro__
            for name in " ".join(vars(kind).get("help_groups", {}).values()).split()
        }
        assert named <= settings_class.model_fields.keys(), command


def test_help_and_version_are_printed(cli: Cli) -> None:
    assert cli("--help").out == cli().out
    assert cli("--version").out == f"kvatlas {own_version()}\n"
    assert all(command in cli("--help").out for command in COMMANDS)


def test_every_shared_flag_has_a_description() -> None:
    assert all(field.description for field in Settings.model_fields.values())


@pytest.mark.parametrize(
    ("words", "missing", "extra"),
    [
        (["workers"], "typer", "cli"),
        (["indexer", "--no-wait"], "nats", "indexer"),
        (
            ["publish", "--engine", "vllm", "--endpoint", "tcp://h:1", "--worker-id", "w", "--model-id", "m"],
            "zmq",
            "publisher",
        ),
    ],
)
def test_a_missing_extra_is_reported_in_one_line_with_the_pip_command(
    words: list[str], missing: str, extra: str
) -> None:
    code = (
        "import sys\n"
        "class Absent:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name.partition('.')[0] == {missing!r}:\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "sys.meta_path.insert(0, Absent())\n"
        "from kvatlas_cli.main import run\n"
        f"sys.exit(run({words!r}))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True, timeout=60, check=False
    )
    line = (
        f"kvatlas {words[0]} needs the extra '{extra}': pip install 'kvatlas[{extra}]' (in a checkout '.[{extra}]')\n"
    )
    assert (done.returncode, done.stderr) == (1, line)


@pytest.mark.parametrize("command", COMMANDS)
def test_the_list_of_commands_says_what_a_commands_own_help_says(command: str) -> None:
    module, _, function = COMMANDS[command].partition(":")
    found = getattr(import_module(module), function)
    own = found.info.help if isinstance(found, Typer) else found.__doc__
    assert own is not None and own.partition("\n\n")[0] == SUMMARIES[command]


def test_the_list_of_commands_imports_none_of_them() -> None:
    code = (
        "import sys; from kvatlas_cli.main import run; run(['--help'])\n"
        "assert not {'redis', 'pydantic', 'nats', 'asyncio', 'opentelemetry'} & set(sys.modules), sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, timeout=60, check=True)


@pytest.mark.parametrize(
    ("words", "loaded"),
    [
        (["doctor"], False),
        (["doctor", "--nats-url", "WSS://127.0.0.1:1"], True),
        (["doctor", "--nats-url-file", "url"], True),
    ],
)
def test_aiohttp_is_imported_only_where_an_address_may_be_of_websockets(words: list[str], loaded: bool) -> None:
    """The import takes a third of the start-up time of a command with NATS."""
    code = (
        "import sys; from kvatlas_cli.main import run\n"
        f"run([*{words!r}, '--help'])\n"
        "import kvatlas.bus.connection; print(bool(sys.modules.get('aiohttp')))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.split()[-1] == str(loaded)
