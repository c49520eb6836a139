"""From an engine's extra keys to the canonical ones, which are hashed (their form: `kvatlas.blocks.hashing`)."""

from collections.abc import Sequence
from typing import Any

from kvatlas.blocks.hashing import ExtraKeys
from kvatlas.errors import EngineEventError


def split_vllm_keys(
    keys: Sequence[Any], lora_name: str | None, first_is_root: bool
) -> tuple[list[ExtraKeys] | None, str | None]:
    """(canonical keys without salt, one entry a block; salt or None) of a vLLM event's `extra_keys`.

    vLLM writes LoRA name, multimodal keys, salt (first block of a prompt only), embedding digest. A text after the LoRA
    name in a prompt's first block is taken for the salt; versions that write multimodal identifiers without an offset
    can't be told apart there. Raises EngineEventError for keys that are not of this form.
    """
    salt: str | None = None
    canonical: list[ExtraKeys] = []
    plain = True
    for i, entry in enumerate(keys):
        if not entry:
            canonical.append(None)
            continue
        if not isinstance(entry, (list, tuple)):
            raise EngineEventError(f"extra keys of block {i} are {entry!r:.60}; expected an array or nil")
        rest = list(entry)
        if lora_name is not None and rest[0] == lora_name:
            del rest[0]
        kept: list[Any] = []
        for key in rest:
            if i == 0 and first_is_root and isinstance(key, str):
                if salt is not None:  # two texts: the earlier one was a multimodal identifier
                    kept.append(salt)
                salt = key
            elif isinstance(key, (list, tuple, str, bytes)):
                kept.append(list(key) if isinstance(key, (list, tuple)) else key)
            else:
                raise EngineEventError(f"extra key {key!r:.60} of block {i}; expected text, bytes or a pair")
        canonical.append(kept or None)
        plain = plain and not kept
    return (None if plain else canonical), salt


def with_root_salt(keys: Sequence[ExtraKeys] | None, salt: str | None) -> Sequence[ExtraKeys] | None:
    """The keys with `salt` at its canonical place in the first block's."""
    if salt is None:
        return keys
    first = list((keys[0] if keys else None) or ())
    at = next((i for i, key in enumerate(first) if isinstance(key, bytes)), len(first))
    first.insert(at, salt)
    return [first, *(keys[1:] if keys else ())]
