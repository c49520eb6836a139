"""Single blocks over HTTP: what `kvatlas locate`, `children` and `remove` do, for other programs.

GET /blocks             who holds a block
GET /blocks/children    who holds the blocks that follow it; without a hash, who holds first blocks
POST /blocks/remove     remove it from `worker`

The query names the block, by `hash` (with `prefix` if it is a key) or by `engine_hash`, and its scope: `model_id`,
`tokenizer_id`, `adapter_id`, `tenant_id`, `chain`.
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from kvatlas.block_lookup.fields import residency_fields
from kvatlas.block_lookup.lookup import BlockLookup
from kvatlas.blocks.block_names import BlockName, read_block_name
from kvatlas.blocks.residency import Residency
from kvatlas.errors import InvalidValue, NotSupported, Unreachable
from kvatlas.identity import DEFAULT_TENANT, OWN_CHAIN, Scope, check_worker_id

_KNOWN = {"model_id", "tokenizer_id", "adapter_id", "tenant_id", "chain", "hash", "prefix", "engine_hash", "worker"}


def block_routes(lookup: BlockLookup) -> Sequence[Route]:
    """Routes to an index that this process writes."""

    async def locate(request: Request) -> Any:
        scope, name = _read(request)
        return _list(await lookup.locate(scope, _named(name)))

    async def children(request: Request) -> Any:
        return _list(await lookup.children(*_read(request)))

    async def remove(request: Request) -> Any:
        scope, name = _read(request)
        worker_id = check_worker_id(request.query_params.get("worker", ""))
        return {"worker": worker_id, "removed": await lookup.remove(scope, worker_id, _named(name))}

    return [
        Route("/blocks", _answering(locate), methods=["GET"]),
        Route("/blocks/children", _answering(children), methods=["GET"]),
        Route("/blocks/remove", _answering(remove), methods=["POST"]),
    ]


def _read(request: Request) -> tuple[Scope, BlockName | None]:
    given = request.query_params
    for name in given:
        if name not in _KNOWN:
            raise InvalidValue(f"query {name!r:.80} is not known; expected {', '.join(sorted(_KNOWN))}")
    model_id = given.get("model_id")
    if not model_id:
        raise InvalidValue("model_id is missing; expected the model of the block")
    scope = Scope(
        model_id,
        given.get("tokenizer_id") or model_id,
        given.get("adapter_id") or None,
        given.get("tenant_id") or DEFAULT_TENANT,
        given.get("chain") or OWN_CHAIN,
    )
    return scope, read_block_name(scope, given.get("hash"), given.get("prefix"), given.get("engine_hash"))


def _named(name: BlockName | None) -> BlockName:
    if name is None:
        raise InvalidValue("no block is named; give hash or engine_hash")
    return name


def _list(found: Sequence[Residency]) -> list[dict[str, Any]]:
    return [residency_fields(one) for one in found]


def _answering(answer: Callable[[Request], Awaitable[Any]]) -> Callable[[Request], Awaitable[Response]]:
    async def handled(request: Request) -> Response:
        try:
            return JSONResponse(await answer(request))
        except (InvalidValue, NotSupported) as error:
            return JSONResponse({"error": str(error)}, 400)
        except Unreachable as error:
            return JSONResponse({"error": str(error)}, 503)

    return handled
