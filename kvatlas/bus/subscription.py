"""Ends a NATS subscription, even during cancellation."""

import anyio
from nats.aio.client import Client
from nats.aio.subscription import Subscription
from nats.errors import BadSubscriptionError, ConnectionClosedError, ConnectionDrainingError

DEADLINE_S = 1.0


async def unsubscribe(subscription: Subscription, client: Client) -> None:
    """Unsubscribe within DEADLINE_S. A closed connection, or a server that has forgotten the subscription, is no error."""
    if not client.is_connected:
        return
    with anyio.move_on_after(DEADLINE_S, shield=True):
        try:
            await subscription.unsubscribe()
        except (BadSubscriptionError, ConnectionClosedError, ConnectionDrainingError):
            return
