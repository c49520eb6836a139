"""Does NATS hear this replica, and this replica NATS? Asked with a message to itself.

Not with a flush: nats-py 2.16 answers one at once where its reader has ended, and then nothing is heard any more.
"""

import anyio
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription


class Echo:
    """`start`, then `check` as often as wanted, then `stop`."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._inbox = client.new_inbox()
        self._subscription: Subscription | None = None
        self._asked = 0
        self._heard = 0
        self._hearing = anyio.Event()

    async def start(self) -> None:
        """Listen. Raises nats errors if the connection is closed."""
        self._subscription = await self._client.subscribe(self._inbox, cb=self._on_echo)

    async def check(self, deadline_s: float) -> None:
        """Returns when the message came back. Raises TimeoutError, or what nats raises where it can't be sent."""
        if not self._client.is_connected:  # it would be sent, and come back, after the next connection
            raise TimeoutError("NATS is not connected")
        self._asked += 1
        asked = self._asked
        await self._client.publish(self._inbox, str(asked).encode())
        with anyio.move_on_after(deadline_s):
            while self._heard < asked:
                self._hearing = anyio.Event()
                await self._hearing.wait()
        if self._heard < asked:
            raise TimeoutError(f"no echo from NATS in {deadline_s:g} s")

    async def stop(self) -> None:
        """Listen no longer."""
        if self._subscription is not None and self._client.is_connected:
            await self._subscription.unsubscribe()
        self._subscription = None

    async def _on_echo(self, msg: Msg) -> None:
        self._heard = max(self._heard, int(msg.data))
        self._hearing.set()
