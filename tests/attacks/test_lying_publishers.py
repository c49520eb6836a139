"""What publishers can do by lying about their own workers, within what their identities allow, is bounded."""

from pathlib import Path

import pytest

from kvatlas.identity import Scope
from kvatlas.store.connection import Store
from tests.attacks.guarded_router import ACME, COMPLETIONS, OTHER, bearer, completion, guarded_router, tenants_fleet
from tests.http_client import http_client
from tests.router.proxy.engines import MODEL

pytestmark = pytest.mark.anyio


async def test_false_blocks_attract_only_prompts_of_tenants_that_the_publisher_may_see(
    store: Store, valkey_url: str, tmp_path: Path
) -> None:
    """The liar claims every tenant's prompt and refuses each request: all are answered, by another engine."""
    prompt = list(range(5_000, 5_160))
    async with tenants_fleet(store) as (fleet, recorder), guarded_router(valkey_url, tmp_path) as router:
        for tenant in ("acme", "other"):
            await fleet.holds("acmes", prompt, Scope(MODEL, MODEL, None, tenant))
        async with http_client(base_url=router.url, timeout=60) as client:
            for key in (ACME, OTHER):
                for number in range(8):
                    said = completion(prompt=[*prompt, number], user=f"of-{key}")
                    answer = await client.post(COMPLETIONS, json=said, headers=bearer(key))
                    assert answer.status_code == 200, answer.text
        assert f"of-{ACME}".encode() in recorder.received
        assert f"of-{OTHER}".encode() not in recorder.received
