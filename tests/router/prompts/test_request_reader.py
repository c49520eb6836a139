"""The program that a prompt belongs to, even if its text is not read."""

import pytest

from kvatlas_router.prompts.catalogue import Catalogue
from kvatlas_router.prompts.request_reader import RequestReader
from kvatlas_router.tenancy.caller import ANYBODY, Caller
from kvatlas_router.tokens.text_request import Api, TextRequest
from router_client.chain_cache import ChainCache
from tests.router.prompts.test_catalogue import Fleet
from tests.router.proxy.engines import MODEL, SCOPE
from tests.router.upstream.nearby_engines import engine_client

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(("caller", "program"), [(Caller("billing", "default"), "billing"), (ANYBODY, "")])
async def test_every_prompt_is_its_programs(caller: Caller, program: str) -> None:
    fleet = Fleet()
    fleet.open.set()
    text = TextRequest.of(Api.COMPLETIONS, {"model": MODEL, "prompt": [1, 2, 3]})
    async with engine_client() as client:
        reader = RequestReader(Catalogue(fleet.read, client), None, ChainCache())
        prompts = [
            await reader.read(text, None, caller),
            await reader.read_length(MODEL, 100, None, caller),
            reader.guess(SCOPE, 100, None, caller),
        ]
    assert [one.prompt.program for one in prompts] == [program] * 3
