"""The gate in front of the proxy's application. A request passes if its tenant is proven and its client is within its limits.

Its `Permit` is then in the scope (`permit_of`), and the headers of its answer say what is left of the limits
(`x-ratelimit-*`).
"""

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvatlas.http.access import PROBES
from kvatlas.http.guard import CERTIFICATE, BodyTooLong, bounded_body
from kvatlas_router.proxy.client_request import ErrorKind, send_error
from kvatlas_router.proxy.headers import RawHeaders
from kvatlas_router.tenancy.entrance import Entrance
from kvatlas_router.tenancy.limits import OverLimit, Permit
from kvatlas_router.tenancy.refusals import ForeignTenant, KeysUnknown, Unproven

_OPEN = PROBES | {"/version"}


class TenantGate:
    """An ASGI application that wraps another one."""

    def __init__(self, application: ASGIApp, entrance: Entrance) -> None:
        self._application = application
        self._entrance = entrance

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] in _OPEN or scope["method"] == "OPTIONS":  # browsers send no key with OPTIONS
            await self._application(scope, receive, send)
            return
        path = scope["path"]
        try:
            permit = await self._entrance.admit(*proof_in(scope))
        except Unproven as error:
            await send_error(send, path, ErrorKind.UNPROVEN, str(error), added=((b"www-authenticate", b"Bearer"),))
            return
        except ForeignTenant as error:
            await send_error(send, path, ErrorKind.FOREIGN, str(error))
            return
        except KeysUnknown as error:
            await send_error(send, path, ErrorKind.UNAVAILABLE, str(error))
            return
        except OverLimit as error:
            await send_error(
                send, path, ErrorKind.BUSY, str(error), retry_after_s=error.retry_after_s, added=error.headers
            )
            return
        try:
            scope["kvatlas.permit"] = permit
            bounded = self._bounded(scope, permit, receive)
            await self._application(scope, bounded, self._with_headers(permit, send))
        finally:
            permit.end()

    def _with_headers(self, permit: Permit, send: Send) -> Send:
        async def sent(message: Message) -> None:
            if message["type"] == "http.response.start" and (added := permit.headers()):
                kept = [one for one in message["headers"] if not one[0].lower().startswith(b"x-ratelimit-")]
                message = {**message, "headers": [*kept, *added]}
            await send(message)

        return sent

    def _bounded(self, scope: Scope, permit: Permit, receive: Receive) -> Receive:
        """A `receive` that raises BodyTooLong above the caller's limit."""
        caller = permit.caller
        if (limit := caller.limits.body_bytes) is None:
            return receive
        announced = next((int(value) for name, value in scope["headers"] if name == b"content-length"), 0)

        def count(error: BodyTooLong) -> None:
            self._entrance.count_too_long(caller, error.detail)

        return bounded_body(receive, announced, limit, count)


def proof_in(scope: Scope) -> tuple[RawHeaders, str, frozenset[str]]:
    """What a request shows to prove its sender, for `Entrance.prove`: its headers, its address, and the names in its client's
    certificate."""
    return scope["headers"], scope["client"][0] if scope["client"] else "", scope.get(CERTIFICATE, frozenset())


def permit_of(scope: Scope) -> Permit | None:
    """The request's permit from the gate; None if this router has no clients file."""
    return scope.get("kvatlas.permit")
