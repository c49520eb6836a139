"""Sends requests to publishers on their control subjects."""

from collections.abc import Iterable

import anyio
from nats.aio.client import Client
from nats.errors import Error as NatsError

from kvatlas.bus.control import ControlOp, ControlReply, ControlRequest
from kvatlas.bus.subjects import control_subject
from kvatlas.errors import InvalidValue

AT_ONCE = 64
ANSWER_S = 2.0


async def ask_publishers(
    client: Client, worker_ids: Iterable[str], request: ControlOp | ControlRequest, answer_s: float = ANSWER_S
) -> dict[str, ControlReply]:
    """The replies, by worker. Workers that don't answer in time, or that answer for a different worker, are missing."""
    replies: dict[str, ControlReply] = {}
    limit = anyio.CapacityLimiter(AT_ONCE)
    payload = (request if isinstance(request, ControlRequest) else ControlRequest(op=request)).pack()

    async def ask(worker_id: str) -> None:
        async with limit:
            try:
                msg = await client.request(control_subject(worker_id), payload, timeout=answer_s)
                reply = ControlReply.unpack(msg.data)
            except (NatsError, TimeoutError, InvalidValue):
                return
        if reply.worker_id == worker_id:
            replies[worker_id] = reply

    async with anyio.create_task_group() as group:
        for worker_id in worker_ids:
            group.start_soon(ask, worker_id)
    return replies
