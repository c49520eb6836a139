"""Bytes of KV cache per token, from a model's configuration (`config.json` as Hugging Face's transformers writes it).

A layer keeps a key and a value for each KV head: 2 × layers × KV heads × head size × bytes of the data type. Multi-head latent
attention (DeepSeek V2 and later) keeps one latent vector and one rotary key instead. Layers without a cache that grows with the
prompt (linear attention, mamba) keep nothing per token. For an instance with several GPUs, the result is the sum over all of
them.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvatlas.errors import InvalidValue, SettingsError
from kvatlas.validation import MAX_BLOCK_BYTES

MAX_CONFIG_BYTES = 4 << 20
_DTYPE_BYTES = {
    **dict.fromkeys(("float32", "float"), 4),
    **dict.fromkeys(("float16", "half", "bfloat16"), 2),
    **dict.fromkeys(("fp8", "fp8_e4m3", "fp8_e5m2", "fp8_inc", "int8"), 1),
}
_CACHED_LAYERS = {"full_attention", "sliding_attention", "chunked_attention", "attention"}


def read_token_bytes(path: Path, dtype: str = "auto") -> int:
    """Read a configuration file, or `config.json` in a folder. Raises SettingsError with a one-line message."""
    file = path / "config.json" if path.is_dir() else path
    try:
        with file.open("rb") as opened:
            text = opened.read(MAX_CONFIG_BYTES + 1)
        if len(text) > MAX_CONFIG_BYTES:
            raise InvalidValue(f"more than {MAX_CONFIG_BYTES} bytes")
        return token_bytes_of(json.loads(text), dtype)
    except OSError as error:
        raise SettingsError(f"--model-config-path {file}: {error.strerror or error}") from error
    except (InvalidValue, ValueError, RecursionError) as error:
        raise SettingsError(f"--model-config-path {file}: {error}; set --block-bytes instead") from error


def token_bytes_of(config: Any, dtype: str = "auto") -> int:
    """Bytes per token from a parsed configuration. For a multimodal model, its text model counts. Raises InvalidValue,
    whose message names the field."""
    if not isinstance(config, dict):
        raise InvalidValue("not a JSON object; expected a model's configuration")
    nested = (
        config[name] for name in ("text_config", "llm_config", "language_config") if isinstance(config.get(name), dict)
    )
    text: Mapping[str, Any] = next(nested, config)
    named = text.get("dtype") or text.get("torch_dtype") or config.get("dtype") or config.get("torch_dtype")
    name = str(named).removeprefix("torch.") if dtype == "auto" else dtype
    if name not in _DTYPE_BYTES:
        raise InvalidValue(f"data type {name!r:.40}; expected one of {', '.join(_DTYPE_BYTES)}")
    token_bytes = _cached_layers(text) * _layer_values(text) * _DTYPE_BYTES[name]
    if not 0 < token_bytes <= MAX_BLOCK_BYTES:
        raise InvalidValue(f"{token_bytes} bytes of KV cache per token; expected 1 to {MAX_BLOCK_BYTES}")
    return token_bytes


def _cached_layers(text: Mapping[str, Any]) -> int:
    kinds = text.get("layer_types")
    if isinstance(kinds, list):
        return sum(kind in _CACHED_LAYERS for kind in kinds if isinstance(kind, str))
    layers, interval = _count(text, "num_hidden_layers"), text.get("full_attention_interval")
    return layers // interval if type(interval) is int and interval > 0 else layers


def _layer_values(text: Mapping[str, Any]) -> int:
    """The number of values that a layer keeps per token."""
    if text.get("kv_lora_rank"):
        return _count(text, "kv_lora_rank") + _count(text, "qk_rope_head_dim")
    heads = _count(text, "num_attention_heads")
    kv_heads = 1 if text.get("multi_query") is True else _count(text, "num_key_value_heads", heads)
    return 2 * kv_heads * _count(text, "head_dim", _count(text, "hidden_size", heads) // heads)


def _count(text: Mapping[str, Any], name: str, otherwise: int | None = None) -> int:
    value = text.get(name)
    if value is None and otherwise is not None:
        return otherwise
    if type(value) is not int or not 0 < value <= 1 << 31:
        raise InvalidValue(f"{name} is {value!r:.40}; expected a number from 1")
    return value
