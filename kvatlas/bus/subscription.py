"""Ends a NATS subscription, also while being cancelled."""

import anyio
from nats.aio.client import Client
from nats.aio.subscription import Subscription
from nats.errors import BadSubscriptionError, ConnectionClosedError, ConnectionDrainingError

DEADLINE_S = 1.0


async def unsubscribe(subscription: Subscription, client: Client) -> None:
    """Nothing is left to be done where the connection is closed, or the server has forgotten us."""
    if not client.is_connected:
        return
    with anyio.move_on_after(DEADLINE_S, shield=True):
        try:
            await subscription.unsubscribe()
        except (BadSubscriptionError, ConnectionClosedError, ConnectionDrainingError):
            return
