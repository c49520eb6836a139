"""The workers that should exist, from a file or from the pods that Kubernetes lists."""

import sys
from collections.abc import Sequence
from pathlib import Path

from kvatlas.errors import InvalidValue, SettingsError
from kvatlas.identity import check_worker_id
from kvatlas_cli.collector import PodLister, worker_id_of_pod

PODS = "pod/"
"""Prefix of each name in the output of `kubectl get pods --output name`."""
_ENDED = ("Succeeded", "Failed")


def read_expected(file: Path) -> dict[str, str]:
    """Read worker ids, or pods' names as kubectl prints them, one per line; `-` stands for standard input. Raises
    SettingsError for a file that can't be read, or for an invalid worker id."""
    try:
        lines = (sys.stdin.read() if str(file) == "-" else file.read_text()).splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"--expected {file}: {getattr(error, 'strerror', '') or 'not text'}") from None
    try:
        return {_worker_id(line.strip()): "" for line in lines if line.strip() and not line.startswith("#")}
    except InvalidValue as error:
        raise SettingsError(f"--expected {file}: {error}") from None


def _worker_id(line: str) -> str:
    return worker_id_of_pod(line.removeprefix(PODS)) if line.startswith(PODS) else check_worker_id(line)


async def list_expected(api: PodLister, selector: str) -> dict[str, str]:
    """The worker of each pod that has these labels and has not terminated, with a remark about the pod's phase unless it is
    running. Raises KvatlasError."""
    return dict(_expected_pods(await api.list_objects("v1", "pods", selector)))


def _expected_pods(found: Sequence[object]) -> list[tuple[str, str]]:
    expected = []
    for one in found:
        match one:
            case {"metadata": {"name": str(name), **metadata}, **rest} if "deletionTimestamp" not in metadata:
                status = rest.get("status")
                phase = status.get("phase", "Running") if isinstance(status, dict) else "Running"
                if phase not in _ENDED:
                    expected.append((worker_id_of_pod(name), "" if phase == "Running" else f"its pod is {phase}"))
    return expected
