"""From an engine's bytes to engine-neutral events: one file an engine."""

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
    """One ZMQ payload as a batch. Events that can't be decoded are named in `EngineBatch.skipped`.

    Raises EngineEventError, one line, for a payload that is no batch at all: above 8 MiB, not msgpack, of another shape;
    and for an engine kind that has no ZMQ feed.
    """
    decoder = _DECODERS.get(kind)
    if decoder is None:
        known = ", ".join(sorted(_DECODERS))
        raise EngineEventError(f"engine kind {str(kind)!r} has no feed of ZMQ batches; expected one of {known}")
    return decoder(payload)
