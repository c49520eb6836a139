"""A client's attacks on other tenants, each with the refusal it gets."""

import json
from pathlib import Path

import pytest

from kvatlas.fleet_store.fleet_store import FleetStore
from kvatlas.store.connection import Store
from tests.attacks.guarded_router import (
    ACME,
    ACMES_PROMPT,
    CHAT,
    COMPLETIONS,
    OPERATOR,
    OTHER,
    WATCHER,
    bearer,
    clients_text,
    completion,
    guarded_router,
    hints,
    router_process,
    tenants_fleet,
)
from tests.eventually import until
from tests.http_client import http_client
from tests.router.engine_objects.test_object_holders import keeper
from tests.router.proxy.engines import MODEL, record, running_fleet
from tests.router.proxy.faulty_engine import faulty_engine, well

pytestmark = pytest.mark.anyio
DECISION = "x-kvatlas-decision"


async def test_with_the_defaults_a_body_names_no_tenant(store: Store, valkey_url: str) -> None:
    """Nothing can prove a tenant, so there is only one, as the router says at startup."""
    said = "every client belongs to the tenant of --tenant-id"
    async with tenants_fleet(store), router_process(valkey_url, said=said) as router, http_client(timeout=60) as client:
        route = f"{router.url}/kvatlas/route"
        claimed = await client.post(route, json=hints(tenant_id="acme"))
        assert claimed.status_code == 400 and "another tenant" in claimed.json()["error"]["message"]
        headed = await client.post(route, json=hints(), headers={"x-kvatlas-tenant": "acme"})
        assert headed.status_code == 400 and "--control-token-file" in headed.json()["error"]["message"]
        answer = await client.post(router.url + COMPLETIONS, json=completion())
        assert answer.headers[DECISION].startswith('"any";cached=0;')
        assert (await client.post(route, json=hints(tenant_id="default"))).json()["worker"] == "any"


async def test_beyond_loopback_the_defaults_tell_no_decision(store: Store, valkey_url: str) -> None:
    async with (
        tenants_fleet(store),
        router_process(valkey_url, "--control-port", "0", "--engine-addresses", "127.0.0.1", host="0.0.0.0") as router,
        http_client(timeout=60) as client,
    ):
        for streamed in (False, True):
            answer = await client.post(router.url + COMPLETIONS, json=completion(stream=streamed))
            assert answer.status_code == 200 and DECISION not in answer.headers and DECISION not in answer.text


async def test_beyond_loopback_the_defaults_name_no_engine_that_fails(store: Store, valkey_url: str) -> None:
    async with (
        running_fleet(store, {}, {"secret-worker": {"url": "http://127.0.0.1:9"}}),
        router_process(valkey_url, "--control-port", "0", "--engine-addresses", "127.0.0.1", host="0.0.0.0") as router,
        http_client(timeout=60) as client,
    ):
        for streamed in (False, True):
            answer = await client.post(router.url + COMPLETIONS, json=completion(stream=streamed))
            assert answer.status_code == 503
            assert "127.0.0.1" not in answer.text and "secret-worker" not in answer.text


async def test_a_tenant_is_that_of_the_key_and_sees_nothing_of_others(
    store: Store, valkey_url: str, tmp_path: Path
) -> None:
    async with (
        tenants_fleet(store),
        guarded_router(valkey_url, tmp_path) as router,
        http_client(base_url=router.url, timeout=60) as client,
    ):
        for key in (OTHER, ACME):
            for body in (completion(), completion(tenant_id="acme", user="acme", cache_salt="acme")):
                answer = await client.post(COMPLETIONS, json=body, headers=bearer(key))
                assert answer.status_code in (200, 503), answer.text
                assert DECISION not in answer.headers
                assert "any" not in answer.headers.values()
        refused = {
            "no key": {},
            "another scheme": {"authorization": f"Basic {ACME}"},
            "a wrong key": bearer("acme-kez"),
            "the hash of a key": bearer("sha256:" + "0" * 64),
            "a front's address that is claimed": {"x-forwarded-for": "10.9.9.9", "x-kvatlas-tenant": "acme"},
        }
        for act, headers in refused.items():
            for path in (COMPLETIONS, CHAT, "/v1/models", "/v1/responses", "/"):
                answer = await client.request(
                    "GET" if path == "/v1/models" else "POST", path, headers=headers, json=completion()
                )
                assert answer.status_code == 401, (act, path)
                assert answer.headers["www-authenticate"] == "Bearer"
                assert answer.json()["error"]["code"] == "invalid_api_key"
        for path in ("/v1/responses/x", "/v1/files", "/v1/files/x/content", COMPLETIONS, "/v1/models"):
            answer = await client.options(path)  # browsers send OPTIONS without a key
            assert answer.status_code == 405 and answer.json()["error"]["code"] == "method_not_supported", path
        for headers in (
            {**bearer(OTHER), "x-kvatlas-tenant": "acme"},
            {**bearer(ACME), "x-kvatlas-tenant": "other"},
        ):
            answer = await client.post(COMPLETIONS, json=completion(), headers=headers)
            assert answer.status_code == 403 and answer.json()["error"]["code"] == "tenant_not_allowed"
        twice = [*bearer(ACME).items(), ("x-kvatlas-tenant", "acme"), ("x-kvatlas-tenant", "acme-test")]
        assert (await client.post(COMPLETIONS, json=completion(), headers=twice)).status_code == 403
        for probe in ("/health", "/ready"):
            assert (await client.get(probe)).status_code == 200


async def test_a_key_that_may_sees_the_decision_for_its_own_tenant(
    store: Store, valkey_url: str, tmp_path: Path
) -> None:
    async with (
        tenants_fleet(store),
        guarded_router(valkey_url, tmp_path) as router,
        http_client(base_url=router.url, timeout=60) as client,
    ):
        answer = await client.post(COMPLETIONS, json=completion(), headers=bearer(WATCHER))
        assert answer.status_code == 200 and answer.headers[DECISION].startswith('"any";cached=19')


async def test_prompts_go_only_to_workers_that_may_see_them(store: Store, valkey_url: str, tmp_path: Path) -> None:
    """No other worker gets them, whether to answer or to tokenize; that worker gets its own tenant's prompts."""
    for flags in ((), ("on",)):
        async with tenants_fleet(store) as (_, recorder):
            started = guarded_router(valkey_url, tmp_path) if flags else router_process(valkey_url)
            async with started as router, http_client(base_url=router.url, timeout=60) as client:
                for number in range(24):
                    said = [{"role": "user", "content": f"secret {number}"}]
                    body = {"model": MODEL, "messages": said, "max_tokens": 1}
                    answer = await client.post(CHAT, json=body, headers=bearer(OTHER))
                    assert answer.status_code == 200
                assert b"secret" not in recorder.received
                if flags:
                    for number in range(8):
                        body = {"model": MODEL, "prompt": f"acmes {number}", "max_tokens": 1}
                        await client.post(COMPLETIONS, json=body, headers=bearer(ACME))
                    assert b"acmes" in recorder.received


async def test_models_of_workers_for_others_alone_do_not_exist(store: Store, valkey_url: str, tmp_path: Path) -> None:
    """They neither show in lists nor in the answer to a request for one, nor make a request without a model ambiguous."""
    async with (
        faulty_engine(well) as shared,
        faulty_engine(well) as acmes,
        running_fleet(store, {}, {"shared": {"url": shared.url}}),
    ):
        acmes.models, acmes.adapters = ["secret"], ["secret-adapter"]
        own = record("acmes", acmes.url)
        named = {"model_id": "secret", "tokenizer_id": "secret"}
        endpoint = own.endpoint.model_copy(update=named)
        await FleetStore(store).write({"acmes": own.model_copy(update={"tenants": ("acme",), "endpoint": endpoint})})
        async with (
            guarded_router(valkey_url, tmp_path, None, "--tokenizer", "none") as router,
            http_client(base_url=router.url, timeout=60) as client,
        ):

            async def seen(key: str) -> set[str]:
                listed = (await client.get("/v1/models", headers=bearer(key))).json()["data"]
                return {card["id"] for card in listed}

            async def is_known() -> bool:
                return await seen(ACME) == {MODEL, "secret", "secret-adapter"}

            await until(is_known, what="both engines' lists")
            assert await seen(OTHER) == {MODEL}
            for name in ("secret", "secret-adapter", "nosuch"):
                said = [
                    await client.get(f"/v1/models/{name}", headers=bearer(OTHER)),
                    await client.post(COMPLETIONS, json=completion(model=name), headers=bearer(OTHER)),
                ]
                assert [one.status_code for one in said] == [404, 404], name
                assert {one.json()["error"]["message"].replace(name, "X") for one in said} == {
                    "the model 'X' does not exist; /v1/models lists those that do"
                }
            unnamed = {"prompt": ACMES_PROMPT, "max_tokens": 1}
            assert (await client.post(COMPLETIONS, json=unnamed, headers=bearer(OTHER))).status_code == 200
            assert (await client.post(COMPLETIONS, json=unnamed, headers=bearer(ACME))).status_code == 400
            asked = await client.post(COMPLETIONS, json=completion(model="secret"), headers=bearer(ACME))
            assert asked.status_code == 200 and acmes.paths[COMPLETIONS] == 1


async def test_operators_calls_need_their_token_and_take_the_tenant_from_a_header(
    store: Store, valkey_url: str, tmp_path: Path
) -> None:
    async with (
        tenants_fleet(store),
        guarded_router(valkey_url, tmp_path) as router,
        http_client(timeout=60) as client,
    ):
        acts = (
            ("POST", "/kvatlas/route"),
            ("POST", "/kvatlas/done"),
            ("GET", "/status"),
            ("GET", "/metrics"),
            ("GET", "/"),
        )
        for method, path in acts:
            for key in (ACME, WATCHER):
                body = {"id": "x", "status": 500} if path.endswith("done") else hints()
                sent = None if method == "GET" else body
                assert (
                    await client.request(method, router.url + path, json=sent, headers=bearer(key))
                ).status_code == 404
                answer = await client.request(method, router.control + path, json=sent, headers=bearer(key))
                assert answer.status_code == 401
        route = f"{router.control}/kvatlas/route"
        claimed = await client.post(route, json=hints(tenant_id="acme"), headers=bearer(OPERATOR))
        assert claimed.status_code == 400
        headers = {**bearer(OPERATOR), "x-kvatlas-tenant": "acme"}
        proven = (await client.post(route, json=hints(avoid=["acmes"]), headers=headers)).json()
        assert proven["predicted_cached_tokens"] > 150
        for proof in ({"x-api-key": OPERATOR}, {"api-key": OPERATOR, "authorization": "Basic any"}):
            same = {**proof, "x-kvatlas-tenant": "acme"}
            assert (await client.post(route, json=hints(avoid=["acmes"]), headers=same)).json()[
                "predicted_cached_tokens"
            ] > 150
        headers["x-kvatlas-tenant"] = "other"
        assert (await client.post(route, json=hints(), headers=headers)).json()["predicted_cached_tokens"] == 0
        for path in ("/pause", "/resume", "/is_paused", "/shutdown", "/v1/load_lora_adapter"):
            answer = await client.post(router.url + path, json={}, headers=bearer(ACME))
            assert answer.status_code == 404


async def test_a_file_of_clients_is_read_again_and_a_bad_one_changes_nothing(
    store: Store, valkey_url: str, tmp_path: Path
) -> None:
    async with (
        tenants_fleet(store),
        guarded_router(valkey_url, tmp_path) as router,
        http_client(base_url=router.url, timeout=60) as client,
    ):
        file = tmp_path / "clients.toml"

        async def status(key: str) -> int:
            return (await client.get("/v1/models", headers=bearer(key))).status_code

        file.write_text("[clients.x]\nkeys = ['in plain text']\ntenants = ['x']\n")
        assert [await status(OTHER), await status(ACME)] == [200, 200]
        file.write_text(clients_text().replace("[clients.other]", "[clients.nobody]").replace(OTHER, "x"))
        file.write_text("\n".join(clients_text().split("[clients.other]")[:1]))

        async def is_refused() -> bool:
            return await status(OTHER) == 401

        await until(is_refused, what="the file is read again")
        assert await status(ACME) == 200


async def test_what_an_engine_keeps_is_its_tenants_alone(store: Store, valkey_url: str, tmp_path: Path) -> None:
    """A leaked response id is of no use to another tenant, even if one engine keeps everything."""
    async with (
        faulty_engine(keeper("w1")) as engine,
        running_fleet(store, {}, {"w1": {"url": engine.url}}),
        guarded_router(valkey_url, tmp_path) as router,
        http_client(base_url=router.url, timeout=60) as client,
    ):
        asked = {"model": MODEL, "input": "Hi"}
        made = (await client.post("/v1/responses", json=asked, headers=bearer(ACME))).json()["id"]
        follow = {**asked, "previous_response_id": made}
        assert (await client.post("/v1/responses", json=follow, headers=bearer(ACME))).status_code == 200
        assert (await client.get(f"/v1/responses/{made}", headers=bearer(WATCHER))).status_code == 200
        for method, path, body in (
            ("GET", f"/v1/responses/{made}", None),
            ("DELETE", f"/v1/responses/{made}", None),
            ("POST", f"/v1/responses/{made}/cancel", {}),
            ("POST", "/v1/responses", follow),
            ("GET", f"/v1/responses/acme%2F{made}", None),
            *(
                ("POST", f"/v1/responses/{made}/cancel{end}", {})
                for end in ("%0A", "%0a%0a", "%00", "/%0A", "%E2%80%A8")
            ),
            ("GET", f"/v1/files/{made}/content%0A", None),
            ("GET", f"/v1/files/{made}%0D", None),
        ):
            answer = await client.request(method, path, json=body, headers=bearer(OTHER))
            assert answer.status_code == 404, (method, path, answer.text)
        asked_before = engine.asked
        part = {"type": "file", "file": {"file_id": made}}
        chat = {"model": MODEL, "messages": [{"role": "user", "content": [part, {"type": "text", "text": "Hi"}]}]}
        padding = ["x" * 64] * ((9 << 20) >> 6)
        for path, said in (
            (CHAT, chat),
            ("/v1/chat/completions/batch", chat),
            ("/v1/batches", {"input_file_id": made, "padding": padding[: (2 << 20) >> 6]}),
            (CHAT, {**chat, "padding": padding}),
            ("/v1/responses", {**follow, "padding": padding}),
        ):
            for escaped in (False, True):
                content = json.dumps(said)
                if escaped:
                    content = content.replace("file_id", "file\\u005fid").replace("response_id", "response\\u005fid")
                answer = await client.post(path, content=content, headers=bearer(OTHER))
                assert answer.status_code in (400, 404), (path, escaped, answer.text)
        assert engine.asked == asked_before
        assert (await client.get("/v1/files", headers=bearer(OTHER))).status_code == 400
        mine = await client.post("/v1/responses", json={**asked, "request_id": made}, headers=bearer(OTHER))
        assert mine.json()["id"] != made
        assert (await client.get(f"/v1/responses/{made}", headers=bearer(OTHER))).status_code == 404


async def test_calls_of_administration_reach_no_engine(store: Store, valkey_url: str, tmp_path: Path) -> None:
    calls = [
        *("pause", "resume", "is_paused", "shutdown", "sleep", "wake_up", "abort_requests", "reset_prefix_cache"),
        *("flush_cache", "update_weights_from_disk", "start_profile", "collective_rpc", "server_info", "metrics"),
        *("v1/load_lora_adapter", "v1/unload_lora_adapter"),
    ]
    async with (
        faulty_engine(well) as engine,
        running_fleet(store, {}, {"w1": {"url": engine.url}}),
        guarded_router(valkey_url, tmp_path) as guarded,
        router_process(valkey_url, "--control-port", "0") as open_to_all,
        http_client(timeout=60) as client,
    ):
        for router in (guarded, open_to_all):
            for call in calls:
                for method in ("POST", "GET"):
                    answer = await client.request(method, f"{router.url}/{call}", headers=bearer(OTHER), json={})
                    assert answer.status_code == 404, (method, call)
                    assert "\n" not in answer.json()["error"]["message"]
        assert engine.asked == 0


async def test_how_an_engine_calls_and_orders_requests_is_no_clients_choice(
    store: Store, valkey_url: str, tmp_path: Path
) -> None:
    """It chooses neither its request's name within the engine, nor its place in the engine's queue, nor an adapter other than
    the model that its key is checked for. Without tenants, all of this is passed on."""
    chosen = {
        "rid": "acmes",
        "request_id": "acmes",
        "priority": -(2**31),
        "lora_path": "secret",
        "lora_id": "secret",
        "extra_key": "me",
        "mm_hashes": ["acmes"],
        "session_params": {"id": "acmes"},
    }
    headers = {"x-request-id": "acmes", "x-vllm-priority": "-9", "x-kvatlas-tenant": "other"}
    async with (
        faulty_engine(keeper("w1")) as engine,
        running_fleet(store, {}, {"w1": {"url": engine.url}}),
        guarded_router(valkey_url, tmp_path) as guarded,
        router_process(valkey_url) as open_to_all,
        http_client(timeout=60) as client,
    ):

        async def reaches(url: str, path: str, **more: object) -> set[str]:
            body = {
                "model": MODEL,
                "messages": [{"role": "user", "content": "Hi"}],
                "input": "Hi",
                "text": "Hi",
                **more,
            }
            answer = await client.post(url + path, json=body, headers=bearer(OTHER) | headers)
            assert answer.status_code == 200, answer.text
            received = engine.requests[-1]
            return (chosen.keys() & set(await received.json())) | (headers.keys() & set(received.headers))

        for path in (CHAT, "/v1/responses", "/v1/embeddings", "/generate", "/v1/rerank"):
            named = {**chosen, "lora_path": ["secret"]} if path == "/generate" else chosen
            assert not await reaches(guarded.url, path, **named)
        assert await reaches(open_to_all.url, CHAT, **chosen) == chosen.keys() | headers.keys() - {"x-kvatlas-tenant"}
        image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,YQ=="}}
        tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"uuid": {"image": "a"}}}}}
        said = [
            {"role": "user", "content": [{**image, "uuid": "acmes"}, {"type": "text", "text": "Hi", "uuid": "own"}]}
        ]
        await reaches(guarded.url, CHAT, messages=said, tools=[tool])
        got = await engine.requests[-1].json()
        assert got["tools"] == [tool] and got["messages"][0]["content"] == [image, said[0]["content"][1]]
        named = {"model": MODEL, "token_ids": [1, 2], "features": {"mm_hashes": {"image": ["acmes"]}}}
        answer = await client.post(guarded.url + "/inference/v1/generate", json=named, headers=bearer(OTHER))
        assert answer.status_code == 400 and "features" in answer.text
        hidden = await client.post(
            guarded.url + "/generate", json={"text": "Hi", "lora_path": "secret"}, headers=bearer(OTHER)
        )
        assert hidden.status_code == 404  # the text is the model, as the key's models are checked by it
