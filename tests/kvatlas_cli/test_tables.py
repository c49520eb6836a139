"""Every command that prints a table, at 80 columns: no line is wider, and no word is broken."""

import asyncio
import json
from pathlib import Path

import pytest

from kvatlas.blocks.external_chain import hash_text
from kvatlas.embedded import ServerProcess
from kvatlas.fleet_store.fleet_store import FleetStore
from kvatlas.store.connection import connected_store
from kvatlas_cli import commands
from kvatlas_cli.output import print_table
from tests.kvatlas_cli.conftest import CHAIN, TOKENS, Cli

FIRST_BLOCK = hash_text(int.from_bytes(CHAIN[:8], "little"))
PROMPT = ("--model-id", "m", "--tokens", "prompt.json")
TABLES = {
    "workers": ((), "9223372036854775809"),
    "rates": ((), "TTFT overhead: 5000"),
    "audit": (("--deadline", "0"), "no publisher answers for it"),
    "overlap": (PROMPT, "cpu_dram"),
    "route": (PROMPT, "http://w1:8000"),
    "locate": ((FIRST_BLOCK, "--model-id", "m"), FIRST_BLOCK),
    "doctor": (("--listen-s", "0.05"), "no indexer is running"),
    "top": ((), "9223372036854775809"),
}
"""The commands' additional flags, and the texts that must be readable."""
ALIKE = {"children", "replay", "calibrate"}
"""They print with functions that are tested here: `children` prints like `locate`, but needs a side index; a replay takes
minutes."""


@pytest.mark.parametrize("command", TABLES)
def test_a_table_is_readable_at_80_columns(
    command: str, cli: Cli, nats_server: ServerProcess, fleet_store_url: str, tmp_path: Path
) -> None:
    (tmp_path / "prompt.json").write_text(json.dumps(TOKENS))
    flags, readable = TABLES[command]
    done = cli(command, *flags, "--nats-url", nats_server.url, "--redis-url", fleet_store_url, COLUMNS="80")
    assert not done.err and readable in done.out
    assert max(map(len, done.out.splitlines())) <= 80


@pytest.mark.parametrize("command", ["workers", "overlap", "route", "doctor", "top"])
def test_what_publishers_name_neither_commands_a_terminal_nor_forges_a_line(
    command: str, cli: Cli, nats_server: ServerProcess, fleet_store_url: str, tmp_path: Path
) -> None:
    forged = "x\x1b]0;owned\x07\x9b2J\nok       serving             forged"

    async def add() -> None:
        async with connected_store(fleet_store_url, wait=False) as store:
            known = (await FleetStore(store).all())["w1"]
            changes: dict[str, dict[str, object]] = {
                "other": {"model_id": forged, "tokenizer_id": forged},
                "bound": {"upper_bound": forged, "locality_domain": forged, "labels": {forged: forged}},
            }
            endpoints = {id: known.endpoint.model_copy(update={"id": id, **more}) for id, more in changes.items()}
            records = {id: known.model_copy(update={"endpoint": one}) for id, one in endpoints.items()}
            await FleetStore(store).write(records)

    asyncio.run(add())
    (tmp_path / "prompt.json").write_text(json.dumps(TOKENS))
    done = cli(
        command, *TABLES[command][0], "--nats-url", nats_server.url, "--redis-url", fleet_store_url, COLUMNS="200"
    )
    assert all(line.isprintable() for line in (done.out + done.err).splitlines())
    assert not any(line.lstrip().startswith("ok ") and line.endswith(" forged") for line in done.out.splitlines())


def test_every_command_with_a_table_is_tested() -> None:
    folder = Path(commands.__file__).parent
    printing = ("print_table(", ".print_all(")
    found = {file.stem for file in folder.rglob("*.py") if any(name in file.read_text() for name in printing)}
    assert found | {"doctor", "top", "children"} == set(TABLES) | ALIKE


def test_a_table_that_does_not_fit_becomes_paragraphs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    rows = [("w1", "x" * 30, "a note of many words " * 8, "7"), ("w2", "-", "short", "9")]
    print_table("2 things", ("worker", "name", "note", ""), rows)
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == ["2 things", "w1", f"  name: {'x' * 30},"] and max(map(len, lines)) <= 80
    assert lines[-2:] == ["w2", "  name: -, note: short, 9"]
    print_table("1 thing", ("worker",), [("w1",)])
    assert "┃ worker ┃" in capsys.readouterr().out
