"""Free ports are handed out once, whichever process asks, before any server listens on them."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

from kvatlas.embedded.free_port import LEASES, PORTS, free_port

# Prints its ports, and keeps them until it is asked to end.
_DRAW = (
    "from kvatlas.embedded.free_port import free_port; print(*[free_port() for _ in range(200)], flush=True); input()"
)


def test_no_two_processes_get_the_same_port() -> None:
    processes = [
        subprocess.Popen([sys.executable, "-c", _DRAW], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    try:
        with ThreadPoolExecutor() as pool:
            lines = list(pool.map(_first_line, processes))
    finally:
        for process in processes:
            process.communicate("\n", timeout=30)
    ports = [int(word) for line in lines for word in line.split()]
    assert len(ports) == 800
    assert len(set(ports)) == 800


def test_one_process_gets_a_port_once_among_its_last() -> None:
    ports = [free_port() for _ in range(LEASES)]
    assert len(set(ports)) == LEASES


def test_a_process_never_runs_out_of_ports() -> None:
    assert all(free_port() in PORTS for _ in range(len(PORTS) + LEASES))


def _first_line(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline()
