"""Builds the wheel and the sdist from a copy of this checkout, without a network, and makes empty environments for them."""

import subprocess
import sys
from collections.abc import Mapping
from os import environ
from pathlib import Path
from shutil import copytree, ignore_patterns
from venv import EnvBuilder

ROOT = Path(__file__).parents[2]
TOP = ("pyproject.toml", "README.md", "LICENSE")
PACKAGES = {
    "kvatlas": "kvatlas",
    "kvatlas_cli": "kvatlas_cli",
    "kvatlas_publishers": "publishers",
    "kvatlas_indexer": "indexer",
    "kvatlas_router": "router",
    "kvatlas_simulator": "simulator",
    "router_client": "router_client",
}
"""Import name -> folder in the repository."""


def run(*words: str | Path, cwd: Path) -> str:
    """Run a program that does not see the checkout, and return its output. Raises AssertionError with the output if it
    fails."""
    done = subprocess.run(words, cwd=cwd, env=outside(), capture_output=True, text=True, timeout=1_200, check=False)
    assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
    return done.stdout


def outside() -> Mapping[str, str]:
    """The environment variables of a process that gets no path from this one."""
    return {name: value for name, value in environ.items() if name not in {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"}}


def copy_checkout(folder: Path) -> None:
    """Copy everything that is built; links stay links."""
    folder.mkdir()
    for name in TOP:
        (folder / name).write_bytes((ROOT / name).read_bytes())
    ignored = ignore_patterns("__pycache__", "*.egg-info")
    for name, source in PACKAGES.items():
        copytree(ROOT / source, folder / source, symlinks=True, ignore=ignored)
        if name != source:
            (folder / name).symlink_to((ROOT / name).readlink())


def build(kind: str, source: Path, into: Path) -> Path:
    """Build the `wheel` or `sdist` of a folder with this environment's setuptools."""
    script = f"import sys, setuptools.build_meta as backend; print(backend.build_{kind}(sys.argv[1]))"
    name = run(sys.executable, "-c", script, str(into), cwd=source).splitlines()[-1]
    return into / name


def make_environment(folder: Path) -> Path:
    """Make an environment without any package. Returns its Python."""
    EnvBuilder(symlinks=True).create(folder)
    return folder / "bin/python"


def install(python: Path, *words: str) -> None:
    """Install with this environment's pip."""
    run(sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", *words, cwd=python.parent)
