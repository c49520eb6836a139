"""Runs NVIDIA Dynamo's `SelectionService`, with its defaults, as a policy fed with the engines' events.

Its package can't be installed beside kvatlas (it requires an older pydantic), so it runs in a separate Python. It gets events
as vLLM publishes them, over ZMQ; for hybrids, only the events of full attention, because it indexes nothing else. Delivery
takes real time, which a replay does not have. So each engine's events are followed by a block that marks their end, and a
choice waits until the service holds the marks. Then it sees all events so far.

Dynamo's guide requires engines with equal hash seeds (PYTHONHASHSEED), so they are equal here.

One difference remains: the service breaks ties between equal workers arbitrarily, so two runs with one seed may differ a
little.
"""

import json
import os
import subprocess
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from types import MappingProxyType
from typing import Any

import zmq

from kvatlas.errors import InvalidValue
from kvatlas_simulator.cache.kv_events import GpuCleared, KVEvent
from kvatlas_simulator.lab.engine import EngineRequest, VirtualEngine
from kvatlas_simulator.lab.policies.dynamo.events import (
    encode_batch,
    encode_event,
    mark_hash,
    mark_tokens,
    removed,
    stored,
    token_of,
)
from kvatlas_simulator.lab.policies.protocol import LoadBlind
from kvatlas_simulator.lab.requests import LabRequest

PACKAGE = "ai-dynamo-runtime"
INSTALL = f"python -m venv dynamo && dynamo/bin/pip install {PACKAGE}==1.6.1"
SUBSCRIBED_MS = 20_000
STOP_S = 5
_PROCESS = Path(__file__).with_name("selection_process.py")


def check_installed(python: str) -> None:
    """Check that this Python has Dynamo. Raises InvalidValue."""
    try:
        found = subprocess.run([python, "-I", "-c", "from dynamo.llm import SelectionService"], capture_output=True)
    except OSError as error:
        raise InvalidValue(
            f"--dynamo-python is {python!r}: {error.strerror}; expected a Python with {PACKAGE}"
        ) from error
    if found.returncode:
        raise InvalidValue(
            f"policy dynamo: {python} has no {PACKAGE}; install it (`{INSTALL}`), and name that Python with --dynamo-python"
        )


class Dynamo(LoadBlind):
    """One selection service, in its own process until `close`. `python`: one that `check_installed` has approved."""

    def __init__(
        self, engines: Sequence[VirtualEngine], python: str, environment: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        self._up = [True] * len(engines)
        self._block_tokens = engines[0].block_tokens
        self._main_group = engines[0].main_group
        self._context = zmq.Context()
        self._sockets = [self._context.socket(zmq.XPUB) for _ in engines]
        self._seqs = [0] * len(engines)
        self._calls: list[list[Any]] = []
        self._unseen: set[int] = set()
        """Engines with events since the last choice, whose marks may not be in the index yet."""
        self._marks = count()
        self._mark = next(self._marks)
        self._marked: dict[int, int] = defaultdict(int)
        """The hash of each engine's mark."""
        endpoints = {}
        for number, socket in enumerate(self._sockets):
            socket.setsockopt(zmq.XPUB_NODROP, 1)
            socket.setsockopt(zmq.LINGER, 0)
            endpoints[number] = f"tcp://127.0.0.1:{socket.bind_to_random_port('tcp://127.0.0.1')}"
        self._process = subprocess.Popen(
            [python, "-I", str(_PROCESS)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "DYN_LOG": "error", **environment},
            text=True,
        )
        self._write({"workers": endpoints, "block_tokens": self._block_tokens})
        self._read()
        for socket in self._sockets:
            if not socket.poll(SUBSCRIBED_MS, zmq.POLLIN):
                raise RuntimeError(f"Dynamo did not subscribe to events within {SUBSCRIBED_MS / 1e3:.0f} s")
            socket.recv()

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._context.destroy(linger=0)

    # ---------------------------------------------------------------- choices

    def choose(self, request: LabRequest, now_us: float) -> int:
        for engine in sorted(self._unseen):
            self._publish(engine, self._mark_events(engine))
        contents = [token_of(content, request.identity) for content in request.contents]
        held = -(-request.input_tokens // self._block_tokens)
        args = [request.input_tokens, mark_tokens(self._mark, self._block_tokens), sorted(self._unseen)]
        self._calls.append(["choose", str(request.number), contents[:held], *args])
        self._write(self._calls)
        self._calls = []
        if self._unseen:
            self._unseen, self._mark = set(), next(self._marks)
        return int(self._read())

    def record_events(self, engine: int, events: Sequence[KVEvent]) -> None:
        told = [event for event in events if isinstance(event, GpuCleared) or event.group == self._main_group]
        if told:
            self._publish(engine, [encode_event(event, self._block_tokens) for event in told])
            self._unseen.add(engine)

    def record_first_token(self, sequence: EngineRequest, engine: int) -> None:
        self._calls.append(["prefilled", str(sequence.request.number)])

    def record_finish(self, sequence: EngineRequest, engine: int) -> None:
        self._calls.append(["finished", str(sequence.request.number)])

    def record_loss(self, sequence: EngineRequest, engine: int, now_us: float) -> None:
        self._calls.append(["finished", str(sequence.request.number)])

    def record_loads(self, engines: Sequence[VirtualEngine], now_us: float) -> None:
        for number, engine in enumerate(engines):
            if engine.up != self._up[number]:
                self._up[number] = engine.up
                self._calls.append(["set_up", number, engine.up])

    # ---------------------------------------------------------------- events

    def _publish(self, engine: int, events: Sequence[dict[str, Any]]) -> None:
        self._sockets[engine].send_multipart([b"", self._seqs[engine].to_bytes(8, "big"), encode_batch(events)])
        self._seqs[engine] += 1

    def _mark_events(self, engine: int) -> list[dict[str, Any]]:
        """Replace the engine's last mark with this choice's."""
        old, new = self._marked[engine], mark_hash(self._mark)
        self._marked[engine] = new
        tokens = mark_tokens(self._mark, self._block_tokens)
        return [*([removed(old)] if old else []), stored([new], None, tokens, self._block_tokens)]

    # ---------------------------------------------------------------- the process

    def _write(self, what: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(what) + "\n")
        self._process.stdin.flush()

    def _read(self) -> Any:
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline()):
            raise RuntimeError(f"Dynamo's selection ended with exit code {self._process.wait(STOP_S)}")
        return json.loads(line)
