"""A reverse proxy that only forwards, built from the same parts as `kvatlas router`: the baseline for its overhead.

`python -m benchmarks.proxy.bare_proxy ENGINE_URL` prints the URL that it listens on.
"""

import asyncio
import socket
import sys
from collections.abc import AsyncIterator

import httpx
import uvicorn
import uvloop
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route


async def main(engine_url: str) -> None:
    async with httpx.AsyncClient(timeout=60, trust_env=False) as client:

        async def forward(request: Request) -> Response:
            headers = {"content-type": "application/json"}
            engine_request = client.build_request(
                "POST", engine_url + request.url.path, content=await request.body(), headers=headers
            )
            response = await client.send(engine_request, stream=True)

            async def body() -> AsyncIterator[bytes]:
                async for chunk in response.aiter_raw():
                    yield chunk
                await response.aclose()

            return StreamingResponse(body(), response.status_code, media_type=response.headers.get("content-type"))

        listener = socket.create_server(("127.0.0.1", 0))
        print(f"http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
        application = Starlette(routes=[Route("/v1/completions", forward, methods=["POST"])])
        config = uvicorn.Config(application, log_config=None, access_log=False, lifespan="off")
        await uvicorn.Server(config).serve(sockets=[listener])


if __name__ == "__main__":
    try:
        uvloop.run(main(sys.argv[1]))
    except (KeyboardInterrupt, asyncio.CancelledError):
        sys.exit(0)
