"""Checks that messages get to NATS and back, by means of a message that the replica sends to itself.

A flush is not enough: once nats-py 2.16's reader has ended, a flush succeeds immediately although no message arrives.
"""

import anyio
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from kvatlas.bus.connection import unsubscribe


class Echo:
    """Call `start`, then `check` any number of times, then `stop`."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._inbox = client.new_inbox()
        self._subscription: Subscription | None = None
        self._sent = 0
        self._received = 0
        self._arrived = anyio.Event()

    async def start(self) -> None:
        """Subscribe. Raises nats errors if the connection is closed."""
        self._subscription = await self._client.subscribe(self._inbox, cb=self._on_echo)

    async def check(self, deadline_s: float) -> None:
        """Return once a message has come back. Raises TimeoutError, or a nats error if the message can't be sent."""
        if not self._client.is_connected:  # otherwise the message would be sent after a reconnect, and come back then
            raise TimeoutError("NATS is not connected")
        self._sent += 1
        number = self._sent
        await self._client.publish(self._inbox, str(number).encode())
        with anyio.move_on_after(deadline_s):
            while self._received < number:
                self._arrived = anyio.Event()
                await self._arrived.wait()
        if self._received < number:
            raise TimeoutError(f"no echo from NATS in {deadline_s:g} s")

    async def stop(self) -> None:
        if self._subscription is not None:
            await unsubscribe(self._subscription, self._client)
        self._subscription = None

    async def _on_echo(self, msg: Msg) -> None:
        self._received = max(self._received, int(msg.data))
        self._arrived.set()
