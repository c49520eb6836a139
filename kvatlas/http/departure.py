"""Reports to a request's application that its client has disconnected."""

from collections.abc import Callable


class Departure:
    """Lets one request's application know that the client has disconnected or was refused; see `ON_LEAVE`. It has no reference
    to the connection, which would be a cycle."""

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
        """The client has disconnected."""
        call, self._call, self._has_left = self._call, None, True
        if call is not None:
            call()

    def forget(self) -> None:
        """The request is answered."""
        self._call = None
