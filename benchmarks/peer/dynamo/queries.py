"""The peer's indexer over HTTP, with the standard library only, because the peer's processes use this file too."""

import http.client
import json
from collections.abc import Sequence
from typing import Any

MODEL = "bench"
TIMEOUT_S = 30


class DynamoQueries:
    """Queries of a running `dynamo.indexer` over one kept-alive connection."""

    def __init__(self, port: int) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)

    def by_hashes(self, local_hashes: Sequence[int]) -> dict[str, Any]:
        """Overlap of a prompt given as its blocks' local hashes (signed)."""
        return self._post("/query_by_hash", {"block_hashes": local_hashes, "model_name": MODEL})

    def by_tokens(self, tokens: Sequence[int]) -> dict[str, Any]:
        """Overlap of a prompt given as token ids."""
        return self._post("/query", {"token_ids": tokens, "model_name": MODEL})

    def _post(self, path: str, body: object) -> dict[str, Any]:
        self._connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        response = self._connection.getresponse()
        answer = json.loads(response.read())
        if response.status != http.client.OK:
            raise RuntimeError(f"dynamo.indexer answered {path} with {response.status}: {answer}")
        assert isinstance(answer, dict)
        return answer


def depths_of(answer: dict[str, Any], block_size: int) -> dict[int, int]:
    """The blocks in an answer, by worker number."""
    return {int(worker): by_rank["0"] // block_size for worker, by_rank in answer["scores"].items()}


def signed(value: int) -> int:
    """A 64-bit hash as the peer's interfaces take it."""
    return value - (1 << 64) if value >> 63 else value
