"""Imports point one way, files are named by nouns of the field, and the plain install is enough for a router."""

import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name

from tests.project.test_pins import PROJECT, names, required_by

ROOT = Path(__file__).parents[2]
MAY_USE = {
    "kvatlas": set(),
    "publishers": {"kvatlas"},
    "indexer": {"kvatlas"},
    "router_client": {"kvatlas"},
    "router": {"kvatlas", "router_client"},
    "simulator": {"kvatlas", "publishers", "router_client", "router"},
    "kvatlas_cli": {"kvatlas", "publishers", "indexer", "router_client", "router", "simulator"},
}
IMPORT_NAMES = {f"kvatlas_{folder}": folder for folder in ("publishers", "indexer", "router", "simulator")}
"""Import name -> folder, if they differ: the name of a link next to the folder, and the installed name."""
MAX_FILES_IN_A_FOLDER = 18
FIELD_WORDS = {
    "feed", "finding", "hashing", "learning", "pairing", "pricing", "ranking", "routing", "seed", "timing", "tracing",
}  # fmt: skip
"""Nouns of the field; any other gerund or participle is a verb, which may not name a file."""
CATCH_ALLS = {"base", "common", "helper", "helpers", "manager", "misc", "util", "utils"}


def modules_of(package: str) -> dict[str, Path]:
    """The package's modules by name."""
    files = sorted((ROOT / package).rglob("*.py"))
    return {".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): file for file in files}


def imported_names(file: Path) -> Iterator[str]:
    """Every module that a file imports, and every imported name that may be one."""
    for node in ast.walk(ast.parse(file.read_text(), str(file))):
        if isinstance(node, ast.Import):
            yield from (module_path(alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            yield module_path(node.module)
            yield from (module_path(f"{node.module}.{alias.name}") for alias in node.names)


def module_path(name: str) -> str:
    """The dotted path of a module's file in the repository."""
    package, dot, rest = name.partition(".")
    return f"{IMPORT_NAMES.get(package, package)}{dot}{rest}"


def test_each_folder_is_imported_by_the_link_of_its_installed_name() -> None:
    links = {path.name: str(path.readlink()) for path in ROOT.iterdir() if path.is_symlink() and path.name[0] != "."}
    assert links == IMPORT_NAMES


def test_no_two_folders_import_each_other() -> None:
    """A folder and its subfolders count as one."""
    modules = {name: file for package in MAY_USE for name, file in modules_of(package).items()}
    arrows = {
        (file.parent, modules[found].parent)
        for file in modules.values()
        for found in imported_names(file)
        if found in modules
    }
    mutual = {
        f"{one.relative_to(ROOT)} and {other.relative_to(ROOT)}"
        for one, other in arrows
        if (other, one) in arrows and one < other and one not in other.parents and other not in one.parents
    }
    assert not mutual


@pytest.mark.parametrize("package", sorted(MAY_USE))
def test_a_package_imports_only_packages_below_it(package: str) -> None:
    wrong = [
        f"{file.relative_to(ROOT)} imports {name}"
        for file in modules_of(package).values()
        for name in {name.partition(".")[0] for name in imported_names(file)}
        if name in MAY_USE.keys() - {package} - MAY_USE[package]
    ]
    assert not wrong


def test_no_modules_import_each_other_in_a_circle() -> None:
    modules = {name: file for package in MAY_USE for name, file in modules_of(package).items()}
    imports = {name: {found for found in imported_names(file) if found in modules} for name, file in modules.items()}
    for name, found in imports.items():
        found.discard(name)
        if modules[name].name == "__init__.py":  # its exports come from its own modules
            continue
        # importing a package that only exports what its own modules define makes no cycle
        found -= {other for other in found if name.startswith(f"{other}.")}
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


@pytest.mark.parametrize("package", [*sorted(MAY_USE), "tests", "benchmarks"])
def test_no_folder_has_more_than_18_files(package: str) -> None:
    files = Counter(
        file.parent.relative_to(ROOT) for file in modules_of(package).values() if file.name != "__init__.py"
    )
    assert not {str(folder): count for folder, count in files.items() if count > MAX_FILES_IN_A_FOLDER}


@pytest.mark.parametrize("package", [*sorted(MAY_USE), "tests", "benchmarks"])
def test_files_are_named_by_nouns(package: str) -> None:
    """Tests of behaviour may be named after a statement."""
    wrong = [
        name
        for name, file in modules_of(package).items()
        if not file.name.startswith("test_")
        and (word := file.stem.rpartition("_")[2]).endswith(("ing", "ed"))
        and word not in FIELD_WORDS
    ]
    assert not wrong


@pytest.mark.parametrize("package", [*sorted(MAY_USE), "tests", "benchmarks"])
def test_no_file_is_a_catch_all(package: str) -> None:
    assert not [name for name, file in modules_of(package).items() if CATCH_ALLS & set(file.stem.split("_"))]


@pytest.mark.parametrize(
    ("modules", "unused"),
    [
        (
            "kvatlas_publishers.sidecar, kvatlas_cli.commands.publish",
            "httpx kvatlas_indexer kvatlas.index kvatlas.reservations redis",
        ),
        (
            "kvatlas_indexer.service, kvatlas_cli.commands.indexer",
            "httpx kvatlas_publishers kvatlas_router router_client starlette uvicorn",
        ),
        (
            "kvatlas_router.proxy_service, kvatlas_cli.commands.router",
            "aiohttp kvatlas_indexer kvatlas_publishers nats",
        ),
        (
            "kvatlas_simulator.service, kvatlas_cli.commands.simulate_engine",
            "aiohttp kvatlas_indexer kvatlas_publishers.publisher nats redis",
        ),
    ],
)
def test_a_process_imports_nothing_that_only_others_use(modules: str, unused: str) -> None:
    """Nor anything that only its status page needs: each takes megabytes."""
    code = f"import sys, {modules}; print(*sorted({set(unused.split())} & set(sys.modules)))"
    loaded = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True)
    assert not loaded.stdout.split()


def test_the_router_client_needs_only_the_plain_install() -> None:
    code = """if True:
        import sys
        before = set(sys.modules)  # modules that the environment's start-up files load
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
    assert not foreign - {"cryptography"}, "redis loads it where it is installed, and does without it"
