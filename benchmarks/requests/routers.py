"""Three routers behind a plain round-robin balancer with a flaky engine among 16, compared with one router without faults.

`python -m benchmarks.requests routers`. The engines publish their events to `kvatlas up`; indexer, store and router processes
are real. The flaky engine answers every second request with 500, at once.
"""

from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from random import Random

import anyio
import httpx
from rich.table import Table
from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from benchmarks.child_processes import server_process
from benchmarks.requests.clients import Request, Seen, running_engines, send, ttft_ms
from kvatlas.embedded import valkey_server
from kvatlas.http.server import listen, serve
from kvatlas.store.connection import connected_store
from kvatlas_simulator.demo.processes import wait_until_routable

MODEL = "routers"
ENGINES = 16
FLAKY = "e15"
PREFIXES = 32
PREFIX_TOKENS = 2_048
REST_TOKENS = 64
OUTPUT_TOKENS = 8
REQUESTS = 180
PER_S = 6.0
STEP_US = 20_000.0


@dataclass(frozen=True, slots=True)
class Run:
    """Results as clients saw them."""

    name: str
    seen: Sequence[Seen]
    refused: int

    @property
    def lost(self) -> int:
        return sum(bool(one.error) for one in self.seen)

    @property
    def hit_rate(self) -> float:
        return sum(one.cached_tokens for one in self.seen) / sum(one.prompt_tokens for one in self.seen)

    @property
    def spread(self) -> tuple[float, float]:
        """Requests at the fullest and the emptiest good engine, as multiples of the mean."""
        found = Counter(one.worker for one in self.seen if not one.error)
        good = [found[f"e{number}"] for number in range(ENGINES) if f"e{number}" != FLAKY]
        mean = sum(good) / len(good)
        return max(good) / mean, min(good) / mean


class Front:
    """A proxy in front of one engine; while `flaky`, it makes every second request fail."""

    def __init__(self) -> None:
        self.flaky = False
        self.asked = self.refused = 0

    @asynccontextmanager
    async def serve(self, engine_url: str) -> AsyncIterator[str]:
        """Serve; yields the URL."""
        fresh = httpx.Limits(max_keepalive_connections=0)  # the engine may close an idle connection
        async with (
            httpx.AsyncClient(timeout=60, limits=fresh, trust_env=False) as client,
            anyio.create_task_group() as tasks,
        ):

            async def answer(request: HttpRequest) -> Response:
                if request.method == "POST":
                    self.asked += 1
                    if self.flaky and self.asked % 2:
                        self.refused += 1
                        return JSONResponse({"error": {"message": "flaky"}}, 500)
                url, body = f"{engine_url}{request.url.path}", await request.body()
                sent = client.build_request(
                    request.method, url, content=body, headers={"content-type": "application/json"}
                )
                found = await client.send(sent, stream=True)
                media_type = found.headers.get("content-type")
                return StreamingResponse(found.aiter_raw(), found.status_code, media_type=media_type)

            listener = listen("127.0.0.1", 0, "the front")
            application = Starlette(routes=[Route("/{path:path}", answer, methods=["GET", "POST"])])
            await tasks.start(partial(serve, grace_s=0), application, listener)
            yield listener.url
            tasks.cancel_scope.cancel()


async def measure() -> list[Run]:
    """Measure one router without faults, then three with a flaky engine, on the same fleet with other prompts."""
    front = Front()
    engine = {"num_gpu_blocks": 4_096, "decode_step_us": STEP_US}
    async with AsyncExitStack() as stack:
        valkey = await stack.enter_async_context(valkey_server())
        store = await stack.enter_async_context(connected_store(valkey.url, wait=False))
        urls = await stack.enter_async_context(running_engines(MODEL, ENGINES, **engine))
        fronted = await stack.enter_async_context(front.serve(urls[-1]))
        flags = [f"{url},worker=e{number}" for number, url in enumerate(urls)]
        flags[-1] += f",advertise={fronted}"
        up = ["up", "--redis-url", valkey.url, *(word for flag in flags for word in ("--engine", flag))]
        await stack.enter_async_context(server_process("kvatlas_cli.main", up, r"(export) KVATLAS_NATS_URL"))
        await wait_until_routable(store, ENGINES, 60)
        arguments = ["router", "--redis-url", valkey.url, "--port", "0", "--tokenizer", "none", "--no-access-log"]
        routers = [
            (
                await stack.enter_async_context(server_process("kvatlas_cli.main", arguments, r"router at (\S+?);?\s"))
            ).announced
            for _ in range(3)
        ]
        runs = []
        for name, through, flaky in (
            ("one router, no fault", routers[:1], False),
            ("three routers, one engine flaky", routers, True),
        ):
            front.flaky, before = flaky, front.refused
            random = Random(len(through))
            seen = await send(through, MODEL, _requests(random), PER_S, random)
            runs.append(Run(name, seen, front.refused - before))
    return runs


def _requests(random: Random) -> list[Request]:
    prefixes = [[random.randrange(100_000) for _ in range(PREFIX_TOKENS)] for _ in range(PREFIXES)]
    return [
        Request([*random.choice(prefixes), *(random.randrange(100_000) for _ in range(REST_TOKENS))], OUTPUT_TOKENS)
        for _ in range(REQUESTS)
    ]


def tabulate(runs: Sequence[Run]) -> Table:
    """One line per run."""
    table = Table(
        "",
        "lost",
        "TTFT p50 / p99 ms",
        "cached tokens",
        "fullest / emptiest engine",
        "refused by the flaky one",
        "tried again",
    )
    table.title = f"{REQUESTS} requests of {PREFIXES} prefixes of {PREFIX_TOKENS:,} tokens over {ENGINES} engines"
    for run in runs:
        fullest, emptiest = run.spread
        times = f"{ttft_ms(run.seen, 0.5):,.0f} / {ttft_ms(run.seen, 0.99):,.0f}"
        again = sum(one.attempts > 1 for one in run.seen)
        table.add_row(
            run.name,
            str(run.lost),
            times,
            f"{run.hit_rate:.0%}",
            f"{fullest:.2f} / {emptiest:.2f}",
            str(run.refused),
            str(again),
        )
    return table
