"""SGLang's request forms: both engines get the same body, with the prefill server's bootstrap address and a room that only
they share.

Source: SGLang 0.5.23, `GenerateReqInput` (a list of prompts or a request for several answers also takes the rooms after
the given one) and `DataParallelController.follow_bootstrap_room_scheduler` (the room, modulo the number of ranks, is the
prefill rank).
"""

from collections.abc import Mapping
from secrets import randbelow
from typing import Any
from urllib.parse import urlsplit

DEFAULT_PORT = 8998
RANKS = 720_720 * 64
"""A multiple of every number of ranks up to 16 and of every power of two up to 1,024."""
ROOMS = 1 << 62
"""Half the range of a signed 64-bit number, so that the rooms that follow any given room exist too."""


def bootstrap_fields(prefill_url: str, port: int | None, rank: int | None) -> Mapping[str, Any]:
    """The fields for one attempt; each attempt needs its own room. `rank`: the prefill engine's data-parallel rank."""
    host = urlsplit(prefill_url).hostname or ""
    fields: dict[str, Any] = {
        "bootstrap_host": f"[{host}]" if ":" in host else host,
        "bootstrap_port": port or DEFAULT_PORT,
        "bootstrap_room": randbelow(ROOMS) if rank is None else randbelow(ROOMS // RANKS) * RANKS + rank,
    }
    return fields if rank is None else {**fields, "disagg_prefill_dp_rank": rank}
