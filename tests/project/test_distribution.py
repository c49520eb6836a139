"""The wheel and the sdist: their content, and that the wheel works without a checkout. Nothing is downloaded.

`make wheel-test` installs the wheel with each extra from the package index.
"""

import re
import tarfile
from dataclasses import dataclass
from email.parser import Parser
from pathlib import Path
from sysconfig import get_path
from zipfile import ZipFile

import pytest

from tests.project.distribution import PACKAGES, ROOT, build, copy_checkout, install, make_environment, run

DATA = {".lua", ".proto", ".pyi", ".html", ".css", ".js", ".typed"}
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "examples").glob("*.py"))]
IMPORT = re.compile(
    rf"^(?:from (?:{'|'.join(PACKAGES)})[\w.]* import (?:\([^)]*\)|.*)|import (?:{'|'.join(PACKAGES)})\b.*)$", re.M
)


@dataclass(frozen=True)
class Distribution:
    wheel: Path
    sdist: Path
    wheel_of_sdist: Path
    sdist_folder: Path


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Distribution:
    folder = tmp_path_factory.mktemp("distribution")
    copy_checkout(folder / "checkout")
    sdist = build("sdist", folder / "checkout", folder)
    with tarfile.open(sdist) as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", None)  # Python 3.11.4 and later
        archive.extractall(folder / "unpacked")  # noqa: S202 - of our own making
    (unpacked,) = (folder / "unpacked").iterdir()
    for name in ("direct", "indirect"):
        (folder / name).mkdir()
    wheel = build("wheel", folder / "checkout", folder / "direct")
    return Distribution(wheel, sdist, build("wheel", unpacked, folder / "indirect"), unpacked)


@pytest.fixture(scope="module")
def python(built: Distribution, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment with the wheel and this one's dependencies, which does not see the checkout."""
    python = make_environment(tmp_path_factory.mktemp("installed") / "environment")
    install(python, "--no-deps", "--no-index", str(built.wheel))
    (packages,) = python.parents[1].glob("lib/python*/site-packages")
    (packages / "dependencies.pth").write_text(get_path("purelib") + "\n")
    return python


def files(wheel: Path) -> set[str]:
    with ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_the_wheel_has_these_top_level_names_only(built: Distribution) -> None:
    tops = {name.partition("/")[0] for name in files(built.wheel)}
    (metadata,) = (name for name in tops if name.endswith(".dist-info"))
    assert tops == {*PACKAGES, metadata}


def test_the_wheel_has_every_file_of_the_packages(built: Distribution) -> None:
    expected = {
        f"{name}/{path.relative_to(ROOT / folder)}"
        for name, folder in PACKAGES.items()
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {name for name in files(built.wheel) if ".dist-info/" not in name} == expected
    assert {Path(name).suffix for name in expected} >= DATA
    assert {f"{name}/py.typed" for name in PACKAGES} <= expected


def test_the_sdist_has_real_files_and_builds_the_same_wheel(built: Distribution) -> None:
    with tarfile.open(built.sdist) as archive:
        assert all(member.isfile() or member.isdir() for member in archive.getmembers())
    assert not any(path.is_symlink() for path in built.sdist_folder.rglob("*"))
    assert all((built.sdist_folder / name / "__init__.py").is_file() for name in PACKAGES)
    assert built.wheel_of_sdist.name == built.wheel.name and files(built.wheel_of_sdist) == files(built.wheel)


def test_the_metadata_say_what_it_is_and_under_which_license(built: Distribution) -> None:
    with ZipFile(built.wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = Parser().parsestr(archive.read(name).decode())
        license_text = archive.read(name.replace("METADATA", "licenses/LICENSE")).decode()
    assert (metadata["License-Expression"], metadata["Author"]) == ("Apache-2.0", "kvatlas authors")
    assert license_text == (ROOT / "LICENSE").read_text() and "Apache License" in license_text
    assert metadata.get_payload() == (ROOT / "README.md").read_text()
    assert metadata["Description-Content-Type"] == "text/markdown" and metadata["Keywords"]
    links = {entry.partition(", ")[0] for entry in metadata.get_all("Project-URL", [])}
    assert links == {"Homepage", "Documentation", "Source", "Issues", "Changelog"}


def test_every_documented_import_works_with_the_wheel_alone(python: Path, tmp_path: Path) -> None:
    imports = sorted({line for path in DOCUMENTS for line in IMPORT.findall(path.read_text())})
    assert "from router_client import Prompt, RouterClient, Scope" in imports
    script = tmp_path / "imports.py"
    script.write_text("\n".join(imports))
    run(python, script, cwd=tmp_path)


def test_every_module_of_the_wheel_is_imported_from_it(python: Path, tmp_path: Path) -> None:
    script = tmp_path / "modules.py"
    script.write_text(
        "import importlib, pathlib, sys, sysconfig\n"
        f"for name in {list(PACKAGES)}:\n"
        "    found = pathlib.Path(importlib.import_module(name).__file__)\n"
        "    assert found.is_relative_to(sysconfig.get_path('purelib')), found\n"
        f"assert not any(path.startswith({str(ROOT)!r} + '/') and 'site-packages' not in path for path in sys.path)\n"
    )
    run(python, script, cwd=tmp_path)


@pytest.mark.parametrize("name", ["indexer", "publishers", "router", "simulator"])
def test_a_folder_of_the_repository_is_no_package_of_the_installation(python: Path, tmp_path: Path, name: str) -> None:
    script = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({name!r}) is not None)"
    run(python, "-c", script, cwd=tmp_path)


def test_the_installed_command_runs(python: Path, tmp_path: Path) -> None:
    assert "Usage: kvatlas" in run(python.with_name("kvatlas"), "--help", cwd=tmp_path)
    assert "--router" in run(python.with_name("kvatlas"), "up", "--help", cwd=tmp_path)
