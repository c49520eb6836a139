"""Records what SGLang's own radix cache, of any version, publishes and reuses.

It runs under a Python that has torch and needs nothing of this project: `record_sglang.py PACKAGE < configs.jsonl`, where
PACKAGE is the folder of an unpacked wheel. Only the cache and its events are loaded; whatever else these files import is an
empty module. This file does the scheduler's part: match a prompt without its last token, insert what was computed, evict.

A config: {"name", "page", "eagle", "pool", "asks", "seed", "namespaces"}. `pool`: tokens. `namespaces`: prompts have an
`extra_key`, an adapter or a cache salt, or none. Each line out is {"config"}, {"ask": tokens, "salt", "adapter", "hidden",
"hit"} or {"batch": base64}; `hidden`: the prompt has an extra key that no event shows.
"""

import base64
import hashlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import json
import random
import sys
from array import array
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import torch

PACKAGE = Path(sys.argv[1])
_LOADED = (
    "radix_cache",
    "base_prefix_cache",
    "cache_init_params",
    "events",
    "evict_policy",
    "utils",
    "session_radix_cache",
)
REAL = {f"sglang.srt.mem_cache.{name}" for name in _LOADED} | {"sglang.srt.disaggregation.kv_events"}


class _Anything:
    """Stands in for every name of a module that is not loaded."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __call__(self, *args: Any, **__: Any) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) else self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything()

    def __class_getitem__(cls, _: Any) -> Any:
        return cls


class _Empty(ModuleType):
    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__ = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (_Anything,), {}) if name[:1].isupper() else _Anything()


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the few needed files in SGLang's package; all its other modules are empty, as are dependencies that are not
    installed."""

    def find_spec(self, name: str, *_: Any) -> importlib.machinery.ModuleSpec | None:
        file = PACKAGE / (name.replace(".", "/") + ".py")
        if name in REAL and file.exists():
            return importlib.util.spec_from_file_location(name, file)
        if name.split(".")[0] == "sglang":
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Empty(spec.name)

    def exec_module(self, module: ModuleType) -> None: ...


class _Missing(_Finder):
    def find_spec(self, name: str, *_: Any) -> importlib.machinery.ModuleSpec | None:
        top = name.split(".")[0]
        wanted = top in ("triton", "torch_memory_saver", "zmq", "pydantic", "orjson", "psutil", "numpy", "sgl_kernel")
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if wanted else None


def _load_hashes() -> None:
    """Load the functions of `hicache_storage` that make the hashes, without the rest of that file."""
    name = "sglang.srt.mem_cache.hicache_storage"
    file = PACKAGE / (name.replace(".", "/") + ".py")
    if not file.exists():
        return
    import ast

    tree = ast.parse(file.read_text())
    wanted = [node for node in tree.body if isinstance(node, ast.FunctionDef) and "hash" in node.name]
    imports = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
    module = _Empty(name)
    sys.modules[name] = module
    exec(compile(ast.Module([*imports, *wanted], []), str(file), "exec"), module.__dict__)  # noqa: S102


def _hash_pages(key: Any, prior: bytes | None, page_size: int | None = None) -> str | list[str]:
    """Compute what SGLang's C++ extension (since 0.5.15) does: SHA-256 of the previous digest and the page's tokens, as 32
    bits."""
    units = list(key)
    hashes = []
    for start in range(0, len(units), page_size or len(units)):
        page = units[start : start + (page_size or len(units))]
        flat = [token for unit in page for token in (unit if isinstance(unit, tuple) else (unit,))]
        prior = hashlib.sha256((prior or b"") + array("I", flat).tobytes()).digest()
        hashes.append(prior.hex())
    return hashes if page_size else hashes[0]


def _load_native_hashes() -> None:
    name = "sglang.srt.mem_cache.cpp_utils.native_hash"
    sys.modules[name] = module = _Empty(name)
    module.__dict__["get_native_hash"] = _hash_pages


class Allocator(_Anything):
    """Frees what it is given; the cache itself counts what it holds."""

    device = "cpu"


class Engine:
    def __init__(self, module: Any, config: dict[str, Any]) -> None:
        self.page, self.eagle = config["page"], config["eagle"]
        self.module = module
        wanted = {
            "disable": False,
            "req_to_token_pool": None,
            "token_to_kv_pool_allocator": Allocator(),
            "page_size": self.page,
            "enable_kv_cache_events": True,
            "is_eagle": self.eagle,
        }
        made = inspect.signature(module.RadixCache.__init__).parameters
        if "params" in made:
            from sglang.srt.mem_cache.cache_init_params import CacheInitParams

            self.cache = module.RadixCache(CacheInitParams(**wanted))
        else:
            self.cache = module.RadixCache(**{key: value for key, value in wanted.items() if key in made})
        self.has_keys = hasattr(module, "RadixKey")
        fields = inspect.signature(module.RadixKey.__init__).parameters if self.has_keys else {}
        self.has_salts = "cache_salt" in fields
        self.of_arrays = "limit" in fields
        self.names = getattr(getattr(self.cache, "kv_events", None), "lora_names", None)

    def _key(self, tokens: list[int], extra_key: str | None, salt: str | None) -> Any:
        if not self.has_keys:
            return list(tokens)
        more = {"cache_salt": salt} if self.has_salts else {}
        return self.module.RadixKey(array("q", tokens) if self.of_arrays else list(tokens), extra_key, **more)

    def _call(self, what: str, params: str, **values: Any) -> Any:
        """Call a method of the cache: earlier versions take values, later ones one object."""
        method = getattr(self.cache, what)
        names = list(inspect.signature(method).parameters)
        if names == ["params"]:
            made = getattr(self.module, params)
            return method(made(**values))
        return method(*values.values())

    def match(self, tokens: list[int], extra_key: str | None, salt: str | None) -> int:
        if not self.has_keys:
            tokens = tokens[: len(tokens) // self.page * self.page]
        found = self._call("match_prefix", "MatchPrefixParams", key=self._key(tokens, extra_key, salt))
        if hasattr(found, "device_prefix_len"):
            return int(found.device_prefix_len)
        return len(found.device_indices if hasattr(found, "device_indices") else found[0])

    def insert(self, tokens: list[int], extra_key: str | None, salt: str | None) -> None:
        """Insert tokens like a request that ends; KV that is already there is freed."""
        units = len(tokens) - 1 if self.eagle else len(tokens)
        kept = units // self.page * self.page + (1 if self.eagle else 0)
        tokens = tokens[:kept]
        if len(tokens) < self.page + (1 if self.eagle else 0):
            return
        value = torch.arange(len(tokens), dtype=torch.int64)
        self._call("insert", "InsertParams", key=self._key(tokens, extra_key, salt), value=value)

    def evict(self, tokens: int) -> None:
        self._call("evict", "EvictParams", num_tokens=tokens)

    def take(self) -> list[Any]:
        return self.cache.take_events()  # type: ignore[no-any-return]


def record(config: dict[str, Any], module: Any, events: Any) -> None:
    chance = random.Random(json.dumps(config, sort_keys=True))
    engine = Engine(module, config)
    print(json.dumps({"config": config}))
    page = config["page"]
    namespaces: list[tuple[str | None, str | None, str | None, bool]] = [(None, None, None, False)]
    if config["namespaces"]:
        namespaces.append(("hidden", None, None, True))
        if engine.has_salts:
            namespaces.append((None, "salt", None, False))

    def put() -> None:
        found = engine.take()
        if found:
            batch = events.KVEventBatch(ts=1.0, events=found)
            print(json.dumps({"batch": base64.b64encode(msgspec.msgpack.encode(batch)).decode()}))

    def fresh(low: int, high: int) -> list[int]:
        return [chance.randrange(50) for _ in range(chance.randint(low, high))]

    put()
    histories: list[list[int]] = []
    for _ in range(config["asks"]):
        if histories and chance.random() < 0.85:
            history = chance.choice(histories[-10:])
            first = chance.randint(1, len(history))
            if chance.random() < 0.6:
                first = max(1, first - first % page)  # a page's end
            tokens = history[:first] + fresh(1, 6 * page)
        else:
            tokens = fresh(page, 12 * page)
        extra_key, salt, adapter, hidden = chance.choice(namespaces)
        if not engine.has_keys and (extra_key or salt):
            extra_key, salt, hidden = None, None, False
        hit = engine.match(tokens[:-1], extra_key, salt)
        ask = {"ask": tokens, "salt": salt, "adapter": adapter, "hidden": hidden, "hit": hit}
        print(json.dumps(ask))
        put()  # matching splits nodes
        tokens = tokens + fresh(1, 2 * page)
        engine.insert(tokens, extra_key, salt)
        histories.append(tokens)
        put()
        if (over := int(engine.cache.total_size()) - config["pool"]) > 0:
            engine.evict(over)
            put()
        if chance.random() < 0.01:
            engine.cache.reset()
            put()


if __name__ == "__main__":
    sys.meta_path.insert(0, _Finder())
    sys.meta_path.append(_Missing())
    _load_hashes()
    _load_native_hashes()
    radix = importlib.import_module("sglang.srt.mem_cache.radix_cache")
    wire = importlib.import_module("sglang.srt.disaggregation.kv_events")
    for line in sys.stdin:
        record(json.loads(line), radix, wire)
