"""Imports point one way, and the plain install is enough for a router."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name

from tests.setup.test_pins import PROJECT, names, required_by

ROOT = Path(__file__).parents[2]
OURS = {"kvatlas", "publishers", "indexer", "router_client", "simulator"}
MAY_USE = {
    "kvatlas": set(),
    "publishers": {"kvatlas"},
    "indexer": {"kvatlas"},
    "router_client": {"kvatlas"},
    "simulator": {"kvatlas", "publishers", "router_client"},
}


def our_imports(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text(), str(file))):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            yield node.module.partition(".")[0]


@pytest.mark.parametrize("package", sorted(OURS))
def test_a_package_imports_only_what_it_stands_on(package: str) -> None:
    wrong = [
        f"{file.relative_to(ROOT)} imports {name}"
        for file in sorted((ROOT / package).rglob("*.py"))
        if file.relative_to(ROOT).parts[:2] != ("kvatlas", "cli")  # the commands start every part
        for name in our_imports(file)
        if name in OURS - {package} - MAY_USE[package]
    ]
    assert not wrong


def test_the_router_client_needs_nothing_but_the_plain_install() -> None:
    code = """if True:
        import sys
        before = set(sys.modules)  # what an environment's own start-up files load
        import router_client
        print(*{name.partition(".")[0] for name in sys.modules.keys() - before})
    """
    loaded = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True)
    plain = names(required_by(PROJECT["dependencies"])) | {"kvatlas"}
    owners = packages_distributions()
    foreign = {
        module
        for module in set(loaded.stdout.split()) & owners.keys() - sys.stdlib_module_names
        if not {canonicalize_name(owner) for owner in owners[module]} & plain
    }
    assert not foreign
