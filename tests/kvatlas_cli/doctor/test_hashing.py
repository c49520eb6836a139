"""What doctor says about the code that hashes token ids."""

from kvatlas_cli.doctor import Level
from kvatlas_cli.doctor.hashing import judge_hashing


def test_an_installation_without_compiled_code_is_named_with_the_cure() -> None:
    assert judge_hashing(compiled=True).level is Level.OK
    found = judge_hashing(compiled=False)
    assert found.level is Level.INFO and "in Python" in found.line and "install gcc" in found.advice
