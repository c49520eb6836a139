"""Memory that the C library's allocator keeps after a burst is returned to the system."""

import subprocess
import sys

import pytest

from kvatlas_cli import memory_release
from kvatlas_cli.memory_release import GROWTH_BYTES, MemoryRelease, find_trim

BURST = """
from kvatlas_cli.memory_release import MemoryRelease, find_trim, resident_bytes

release = MemoryRelease(find_trim())
burst = [bytes(1_000) for _ in range(100_000)]
kept = burst[::100]
grown = resident_bytes()
del burst
before, released, after = resident_bytes(), release.check(), resident_bytes()
assert grown - before < 50 << 20, "glibc gives all of it back by itself; this test shows nothing"
print(released, before - after >= 50 << 20)
"""


@pytest.mark.skipif(find_trim() is None, reason="only glibc keeps what is freed, and has malloc_trim")
def test_a_burst_is_given_back() -> None:
    done = subprocess.run([sys.executable, "-c", BURST], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["True", "True"], done.stderr


def test_memory_is_given_back_only_after_growth(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = iter([100, 100 + GROWTH_BYTES - 1, 40, 40 + GROWTH_BYTES, 50, 50 + GROWTH_BYTES - 1])
    monkeypatch.setattr(memory_release, "resident_bytes", lambda: next(sizes))
    trimmed: list[int] = []
    release = MemoryRelease(trimmed.append)
    assert [release.check() for _ in range(4)] == [False, False, True, False]
    assert trimmed == [0]
