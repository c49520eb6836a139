"""Fields of a body that no tenant's client may set, because engines read them as if all clients trusted each other.

`rid` and `request_id` name a request within its engine: SGLang 0.5.23 and vLLM 0.33 keep a response under the name that its
body gives, so a client could replace another's, or read it. `priority` puts a request before all others in the engine's own
queue. `lora_path` and `lora_id` choose an adapter in SGLang apart from the model, and a client's key is checked only
for the model.
"""

from collections.abc import Mapping
from typing import Any

FIELDS = frozenset({"lora_id", "lora_path", "priority", "request_id", "rid"})
_GENERATE = "/generate"
"""SGLang's own call, where `lora_path` is the only name of a model: one text counts as it, a list does not."""


def withheld_from_tenants(path: str, body: Mapping[str, Any]) -> frozenset[str]:
    """The fields of a decoded body that have to be removed."""
    found = FIELDS & body.keys()
    if path == _GENERATE and isinstance(body.get("lora_path"), str):
        found -= {"lora_path"}
    return found
