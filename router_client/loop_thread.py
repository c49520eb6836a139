"""An event loop in its own thread, for callers that have no event loop."""

import asyncio
import ctypes
import os
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import CancelledError, Future, wait
from contextlib import AbstractAsyncContextManager, contextmanager
from threading import Lock, Thread, get_ident
from types import TracebackType
from typing import Any, ParamSpec, Self, TypeVar
from weakref import WeakSet

from router_client.errors import ClientClosed

P = ParamSpec("P")
T = TypeVar("T")

_open: "WeakSet[LoopThread]" = WeakSet()


class _Call:
    """A block that runs in a task. `cancel` ends it, even if it has not been entered yet."""

    def __init__(self) -> None:
        self._task: asyncio.Task[Any] | None = None
        self._cancelled = False

    def __enter__(self) -> None:
        if self._cancelled:
            raise asyncio.CancelledError
        self._task = asyncio.current_task()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._task = None

    def cancel(self) -> None:
        """Cancel the block. Call it in the loop's thread."""
        self._cancelled = True
        if self._task is not None:
            self._task.cancel()


class LoopThread:
    """Runs coroutine functions for any number of threads. Exiting its block cancels everything that is still running, and
    ends the thread.

    Each coroutine runs in a copy of its caller's context, so spans keep their parents. The thread does not outlive the
    process, and a forked process does not have it: in such a process, every call raises ClientClosed, and exiting the block
    does nothing.
    """

    def __init__(self, name: str) -> None:
        self._ready: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = Future()
        self._thread = Thread(target=self._serve, name=name, daemon=True)
        self._pid = os.getpid()
        self._closing = Lock()
        self._closed = False

    def __enter__(self) -> Self:
        self._thread.start()
        self._loop, self._over = self._ready.result()
        _open.add(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not self._forked:
            _open.discard(self)
            with self._closing:
                self._closed = True
            self._loop.call_soon_threadsafe(self._over.set)
            self._thread.join()

    def submit(self, function: Callable[P, Coroutine[Any, Any, T]], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Start the function in the loop; cancelling the future cancels it there. Raises ClientClosed."""
        if self._forked:
            raise ClientClosed(
                f"the router client was opened in process {self._pid}, which forked; open one in process {os.getpid()}"
            )
        with self._closing:  # so that ending the loop cancels everything that started before, and loses nothing
            if self._closed:
                raise ClientClosed("the router client is closed")
            return asyncio.run_coroutine_threadsafe(function(*args, **kwargs), self._loop)

    def run(self, function: Callable[P, Coroutine[Any, Any, T]], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run the function, and return what it returns or raise what it raises. Interrupting the caller cancels the
        function.

        Raises ClientClosed, also if the loop is closed in the meantime. Raises RuntimeError in the loop itself, which
        would otherwise wait for itself.
        """
        if self._thread.ident == get_ident():
            raise RuntimeError("a sync router client is called from its own event loop; use the async one there")
        call = _Call()

        async def in_call() -> T:
            with call:
                return await function(*args, **kwargs)

        try:
            return self.submit(in_call).result()
        except CancelledError:
            raise ClientClosed("the router client was closed during the call") from None
        except Exception:
            raise
        except BaseException:  # a KeyboardInterrupt, perhaps before there is a future to cancel
            with self._closing:
                if not self._closed:
                    self._loop.call_soon_threadsafe(call.cancel)
            raise

    @contextmanager
    def enter(self, manager: AbstractAsyncContextManager[T]) -> Iterator[T]:
        """Enter an async context manager, and exit it together with this block, both in one task of the loop.

        Exceptions in the block are not passed on to the manager.
        """
        entered: Future[T] = Future()
        over = asyncio.Event()

        async def hold() -> None:
            async with manager as value:
                entered.set_result(value)
                await over.wait()

        def fail(task: Future[None]) -> None:
            if not entered.done():
                entered.set_exception(task.exception() or RuntimeError("left before it was entered"))

        task = self.submit(hold)
        task.add_done_callback(fail)
        try:
            yield entered.result()
        finally:
            if not self._forked:
                if entered.done():
                    self._loop.call_soon_threadsafe(over.set)
                else:  # the caller was interrupted
                    task.cancel()
                wait([task])
        if not self._forked:
            task.result()

    @property
    def closed(self) -> bool:
        """True if this process has exited the `with` block."""
        return self._closed

    @property
    def _forked(self) -> bool:
        return self._pid != os.getpid()

    def abandon(self) -> None:
        """In a forked child, keep the parent's tasks alive. If they were garbage-collected, they would clean up what belongs
        to the parent, over connections that both processes share."""
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(asyncio.all_tasks(self._loop)))

    def _serve(self) -> None:
        async def until_over() -> None:
            over = asyncio.Event()
            self._ready.set_result((asyncio.get_running_loop(), over))
            await over.wait()

        asyncio.run(until_over())


def _abandon_all() -> None:
    for one in _open:
        one.abandon()


os.register_at_fork(after_in_child=_abandon_all)
