"""An engine's HTTP side: a real server whose pages a test sets."""

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

from tests.certificates import IssuedFiles


@dataclass
class EngineHttp:
    """Its current answers: (status, body) by path; other paths get a 404. Paths in `late` are not answered yet. `key`: calls
    without it are refused."""

    server: ThreadingHTTPServer
    pages: dict[str, tuple[int, str]] = field(default_factory=dict)
    late: set[str] = field(default_factory=set)
    key: str = ""
    scheme: str = "http"

    @property
    def url(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self.server.server_port}/"

    def stop(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@contextmanager
def engine_http(files: IssuedFiles | None = None) -> Iterator[EngineHttp]:
    """`files`: serve over TLS, with this certificate."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            while self.path in served.late:
                time.sleep(0.01)
            status, body = served.pages.get(self.path, (404, ""))
            if served.key and self.headers["authorization"] != f"Bearer {served.key}":
                status, body = 401, ""
            self.send_response(status)
            self.end_headers()
            with suppress(ConnectionError):  # the client gave up
                self.wfile.write(body.encode())

        def log_message(self, *_: Any) -> None: ...

    served = EngineHttp(ThreadingHTTPServer(("127.0.0.1", 0), Handler))
    if files is not None:
        served.server.socket = files.server_context().wrap_socket(served.server.socket, server_side=True)
        served.scheme = "https"
    thread = Thread(target=served.server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield served
    finally:
        served.stop()
        thread.join()
