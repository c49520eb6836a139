"""The oracle: the engines' own caches. Opt-in, because they need torch in a Python of their own (`make oracle`)."""

import json
import os
import subprocess
from pathlib import Path

import pytest

PYTHON = os.environ.get("KVATLAS_ORACLE_PYTHON")
SGLANG = Path(os.environ["KVATLAS_ORACLE_SGLANG"]) if os.environ.get("KVATLAS_ORACLE_SGLANG") else None
"""A folder with the unpacked packages of SGLang, each in one named by its version."""

collect_ignore_glob = [] if PYTHON else ["test_*.py"]


@pytest.fixture(scope="module")
def recordings(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the module's RECORDER records for each of its CONFIGS that a test of this run reads."""
    folder = tmp_path_factory.mktemp(request.module.RECORDER.stem)
    assert PYTHON is not None
    configs = request.module.CONFIGS
    selected = [name for name in configs if any(f"[{name}]" in item.name for item in request.session.items)]
    lines = "".join(json.dumps(configs[name]) + "\n" for name in selected)
    command = [PYTHON, request.module.RECORDER, folder]
    done = subprocess.run(command, input=lines, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr[-4_000:]
    return folder
