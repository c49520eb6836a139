"""Reports to the application of a request that the client has disconnected."""

from collections.abc import Callable


class Departure:
    """Lets the application of one request know that the client has disconnected or was refused; see `ON_LEAVE`. It has no
    reference to the connection, because that would create a cycle."""

    __slots__ = ("_call", "_has_left")

    def __init__(self) -> None:
        self._call: Callable[[], None] | None = None
        self._has_left = False

    def __call__(self, call: Callable[[], None]) -> None:
        if self._has_left:
            call()
        else:
            self._call = call

    def report(self) -> None:
        """Report that the client has disconnected."""
        call, self._call, self._has_left = self._call, None, True
        if call is not None:
            call()

    def forget(self) -> None:
        """Stop reporting, because the request has been answered."""
        self._call = None
