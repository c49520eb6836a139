"""Decoders from engines' bytes to engine-neutral events, one file per engine."""

from collections.abc import Callable, Mapping

from kvatlas.errors import EngineEventError
from kvatlas.fleet.records import EngineKind
from kvatlas_publishers.engine_events import EngineBatch
from kvatlas_publishers.engines import mooncake, open_events, sglang, vllm
from kvatlas_publishers.engines.payload import MAX_PAYLOAD_BYTES

__all__ = ["MAX_PAYLOAD_BYTES", "decode_batch"]

_DECODERS: Mapping[EngineKind, Callable[[bytes], EngineBatch]] = {
    EngineKind.VLLM: vllm.decode_batch,
    EngineKind.MOCK: vllm.decode_simulated_batch,
    EngineKind.SGLANG: sglang.decode_batch,
    EngineKind.OPEN: open_events.decode_batch,
    EngineKind.STORE: mooncake.decode_batch,
}


def decode_batch(kind: EngineKind, payload: bytes) -> EngineBatch:
    """Decode one ZMQ payload. Undecodable events are listed in `EngineBatch.skipped`.

    Raises EngineEventError, with a one-line message, for a payload that is not a batch (above MAX_PAYLOAD_BYTES, not
    msgpack, or of another shape) or for an engine kind without a ZMQ feed.
    """
    decoder = _DECODERS.get(kind)
    if decoder is None:
        known = ", ".join(sorted(_DECODERS))
        raise EngineEventError(f"engine kind {str(kind)!r} has no ZMQ feed; expected one of {known}")
    return decoder(payload)
