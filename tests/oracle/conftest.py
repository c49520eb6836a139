"""The oracle: the engines' own caches. Opt-in, because they need torch in a separate Python (`make oracle`)."""

import json
import os
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

PYTHON = os.environ.get("KVATLAS_ORACLE_PYTHON")
SGLANG = Path(os.environ["KVATLAS_ORACLE_SGLANG"]) if os.environ.get("KVATLAS_ORACLE_SGLANG") else None
"""A folder with the unpacked packages of SGLang, each in one named by its version."""

collect_ignore_glob = [] if PYTHON else ["test_*.py"]


@pytest.fixture(scope="module")
def recordings(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the recordings that the module's RECORDER makes of each of its CONFIGS that a test of this run reads."""
    folder = tmp_path_factory.mktemp(request.module.RECORDER.stem)
    configs = request.module.CONFIGS
    run_recorder(request.module.RECORDER, folder, [configs[name] for name in select_names(request)])
    return folder


def select_names(request: pytest.FixtureRequest) -> list[str]:
    """The names of the module's CONFIGS that a test of this run reads."""
    return [name for name in request.module.CONFIGS if any(f"[{name}]" in item.name for item in request.session.items)]


def run_recorder(recorder: Path, argument: Path, configs: Iterable[Mapping[str, Any]]) -> str:
    """A recorder's output for all these configs. It is one process, because it first loads torch, which takes seconds."""
    assert PYTHON is not None
    lines = "".join(json.dumps(config) + "\n" for config in configs)
    done = subprocess.run([PYTHON, recorder, argument], input=lines, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr[-4_000:]
    return done.stdout
