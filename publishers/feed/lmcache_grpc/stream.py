"""The gRPC transport of LMCache's multiprocess server (0.5.6): one stream of batches per subscription.

`lmcache.mp.ObservabilityService/SubscribeKvEvents` streams batches until it ends. A subscription lapses unless its instance
calls `lmcache.mp.ControllerService/Ping`. Batches need no acknowledgement: gRPC's flow control holds the server back.
"""

from collections.abc import Callable
from time import monotonic
from typing import Any

import anyio
import grpc.aio

from kvatlas.errors import EngineEventError
from kvatlas_publishers.engines.lmcache import MAX_BATCH_BYTES, MAX_EVENTS
from kvatlas_publishers.feed.lmcache_grpc.kv_events_pb2 import Batch, Ping, Pong, Subscription

SUBSCRIBE = "/lmcache.mp.ObservabilityService/SubscribeKvEvents"
PING = "/lmcache.mp.ControllerService/Ping"


async def follow(
    target: str,
    instance_id: int,
    model_name: str,
    on_batch: Callable[[dict[str, Any]], None],
    *,
    is_over: Callable[[], bool],
    ping_s: float,
    silent_s: float,
    look_s: float,
) -> None:
    """Follow one subscription until it ends or `is_over`. `target`: host and port. `on_batch`: called with each batch in the
    form that ZMQ uses; it may raise EngineEventError. Raises EngineEventError with the reason if the subscription ends."""
    asked = Subscription(instance_id=instance_id, model_name=model_name, max_events=MAX_EVENTS)
    options = [("grpc.max_receive_message_length", MAX_BATCH_BYTES)]
    ended: list[str] = []
    async with grpc.aio.insecure_channel(target, options) as channel, anyio.create_task_group() as tasks:
        subscribe = channel.unary_stream(
            SUBSCRIBE, request_serializer=Subscription.SerializeToString, response_deserializer=Batch.FromString
        )
        ping = channel.unary_unary(
            PING, request_serializer=Ping.SerializeToString, response_deserializer=Pong.FromString
        )

        async def read() -> None:
            try:
                async for batch in subscribe(asked):
                    on_batch(_plain(batch))
                ended.append("the server ended the subscription")
            except EngineEventError as error:
                ended.append(str(error))
            except grpc.aio.AioRpcError as error:
                ended.append(_why(error))
            tasks.cancel_scope.cancel()

        tasks.start_soon(read)
        pinged_s = monotonic()
        while not is_over():
            await anyio.sleep(look_s)
            if monotonic() - pinged_s > ping_s:
                pinged_s = monotonic()
                try:
                    await ping(Ping(instance_id=instance_id), timeout=silent_s)
                except grpc.aio.AioRpcError as error:
                    ended.append(_why(error))
                    break
        tasks.cancel_scope.cancel()
    if ended:
        raise EngineEventError(ended[0])


def _why(error: grpc.aio.AioRpcError) -> str:
    details = " ".join((error.details() or "no details").split())
    return f"{error.code().name}: {details:.200}"


def _plain(batch: Batch) -> dict[str, Any]:
    return {
        "enabled": batch.enabled,
        "incarnation": batch.incarnation,
        "lost": batch.lost,
        "events": [
            {
                "kind": record.kind,
                "medium": record.medium,
                "block_hashes": list(record.block_hashes),
                "parent_block_hash": record.parent_block_hash if record.HasField("parent_block_hash") else None,
                "token_ids": list(record.token_ids),
            }
            for record in batch.events
        ],
    }
