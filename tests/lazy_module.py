"""A module that is imported when a test first uses it, because every process of a test run collects all tests but runs only
some."""

from importlib import import_module
from typing import Any


class LazyModule:
    """Stands in for the module of this name. Only for large modules: importing LiteLLM takes 4 s of CPU time and 150 MB."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # pytest asks everything in a test file for marks of fixtures and mocks
            raise AttributeError(name)
        return getattr(import_module(self._name), name)
