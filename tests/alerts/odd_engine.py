"""An engine's HTTP side that answers, fails, lies or is late, as a test sets it."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any


@dataclass
class OddEngine:
    """How it behaves from now on. `status`: of its completions. `cached_tokens`: what it reports; None: nothing.
    `more_tokens`: how many more prompt tokens it reports than there are. `tokenize_s`: how long /tokenize takes. `full`: it
    reports that no block of its cache is free. `hangs`: it computes nothing, but answers its status page."""

    url: str
    status: int = 200
    cached_tokens: int | None = 0
    more_tokens: int = 0
    tokenize_s: float = 0.0
    full: bool = False
    hangs: bool = False

    def behave(self) -> None:
        """Behave like any engine again."""
        self.status, self.cached_tokens, self.more_tokens, self.tokenize_s, self.full = 200, 0, 0, 0.0, False
        self.hangs = False

    @property
    def metrics(self) -> str:
        """Its metrics page."""
        config = 'vllm:cache_config_info{block_size="16",num_gpu_blocks="1000"} 1.0'
        return f"{config}\nvllm:kv_cache_usage_perc {float(self.full)}\n"

    def usage(self, prompt_tokens: int) -> dict[str, Any]:
        counted = prompt_tokens + self.more_tokens
        told = {"prompt_tokens": counted, "completion_tokens": 1, "total_tokens": counted + 1}
        if self.cached_tokens is None:
            return told
        return {**told, "prompt_tokens_details": {"cached_tokens": self.cached_tokens}}


@contextmanager
def odd_engine() -> Iterator[OddEngine]:
    """A token is a byte, as in the simulated engines."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            pages = {"/health": "", "/metrics": engine.metrics, "/v1/models": json.dumps({"data": [{"id": "m"}]})}
            self._answer(200 if self.path in pages else 404, pages.get(self.path, ""))

        def do_POST(self) -> None:
            sent = self.rfile.read(int(self.headers["Content-Length"]))
            body = json.loads(sent) if sent else {}  # from a probe, or from a client that disconnected
            tokens = list(str(body.get("prompt", "")).encode())
            if self.path == "/tokenize":
                time.sleep(engine.tokenize_s)
                self._answer(200, json.dumps({"count": len(tokens), "max_model_len": 1 << 20, "tokens": tokens}))
            elif engine.hangs:
                while engine.hangs:
                    time.sleep(0.1)
            elif engine.status != 200:
                self._answer(engine.status, json.dumps({"error": {"message": "odd"}}))
            else:
                self._complete(engine.usage(len(tokens)), streamed=bool(body.get("stream")))

        def _complete(self, usage: dict[str, Any], *, streamed: bool) -> None:
            choice = {"index": 0, "text": "odd", "finish_reason": "length"}
            answer = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": "m"}
            if not streamed:
                self._answer(200, json.dumps({**answer, "choices": [choice], "usage": usage}))
                return
            events = [{**answer, "choices": [choice]}, {**answer, "choices": [], "usage": usage}]
            lines = [json.dumps(event) for event in events]
            self._answer(200, "".join(f"data: {line}\n\n" for line in [*lines, "[DONE]"]), "text/event-stream")

        def _answer(self, status: int, body: str, kind: str = "application/json") -> None:
            payload = body.encode()
            try:
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(payload)))
                self.end_headers()
                self.wfile.write(payload)
            except ConnectionError:
                return  # the client gave up

        def log_message(self, *_: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    engine = OddEngine(f"http://127.0.0.1:{server.server_port}")
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield engine
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
