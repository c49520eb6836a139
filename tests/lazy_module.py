"""A module that is imported when a test first uses it: every process of a test run collects all tests, and runs a part."""

from importlib import import_module
from typing import Any


class LazyModule:
    """Stands for the module of this name. For large ones alone: LiteLLM's import takes 4 s of processor time and 150 MB."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # pytest asks everything in a test file for marks of fixtures and mocks
            raise AttributeError(name)
        return getattr(import_module(self._name), name)
