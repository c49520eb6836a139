"""Stands in for packages that SGLang imports and the stub never calls. torchvision and sgl_kernel exist only for CUDA builds.

It has its own folder because Python runs a `sitecustomize` on its path in every process, including those that SGLang starts.
"""

import importlib.abc
import importlib.machinery
import sys
import types
from typing import Any

ABSENT = ("torchvision", "sgl_kernel")


class _Names(type):
    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class _Module(types.ModuleType):
    __version__ = "0.0.0"

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Names(name, (), {})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, fullname: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        return (
            importlib.machinery.ModuleSpec(fullname, self, is_package=True)
            if fullname.split(".")[0] in ABSENT
            else None
        )

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        module.__file__, module.__path__ = __file__, []


sys.meta_path.append(_Finder())
