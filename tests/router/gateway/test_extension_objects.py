"""InferenceObjectives and InferenceModelRewrites: which apply, and what they do to a request and its answer."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from kvatlas.errors import SettingsError
from kvatlas_router.gateway.answer_reader import AnswerReader
from kvatlas_router.gateway.asked_request import AskedRequest
from kvatlas_router.gateway.extension_objects import ExtensionObjects, PoolObjects
from kvatlas_router.gateway.kubernetes_api import open_kubernetes_api
from kvatlas_router.gateway.picker import Renaming, RequestHead
from kvatlas_router.gateway.sender import SenderTrust
from tests.router.gateway.kubernetes import Namespace

pytestmark = pytest.mark.anyio


TRUST = SenderTrust.of(("X-Gateway-Inference-Objective", "x-llm-d-inference-objective"), "")


def objective(name: str, priority: int | None, pool: str = "pool") -> dict[str, Any]:
    spec: dict[str, Any] = {"poolRef": {"name": pool}} | ({} if priority is None else {"priority": priority})
    return {"metadata": {"name": name}, "spec": spec}


def rewrite(name: str, created: str, *rules: tuple[list[str], dict[str, int]], pool: str = "pool") -> dict[str, Any]:
    listed = [
        {
            "matches": [{"model": {"type": "Exact", "value": model}} for model in models],
            "targets": [{"modelRewrite": target, "weight": weight} for target, weight in targets.items()],
        }
        for models, targets in rules
    ]
    metadata = {"name": name, "creationTimestamp": created}
    return {"metadata": metadata, "spec": {"poolRef": {"name": pool}, "rules": listed}}


def head(**headers: str) -> RequestHead:
    given = {":method": "POST", ":path": "/v1/completions", "content-type": "application/json", **headers}
    return RequestHead([(name.encode(), value.encode()) for name, value in given.items()])


OBJECTS, WRONG = PoolObjects.of(
    "pool",
    [
        objective("fast", 10),
        objective("batch", -3),
        objective("unset", None),
        objective("far", 1, "other"),
        {"spec": 1},
    ],
    [
        rewrite("newer", "2026-02-01T00:00:00Z", (["chat"], {"wrong": 1}), ([], {"wrong-too": 1})),
        rewrite("older", "2026-01-01T00:00:00Z", (["chat"], {"a": 1, "b": 3}), ([], {"default": 1})),
        rewrite("elsewhere", "2025-01-01T00:00:00Z", (["chat"], {"far": 1}), pool="other"),
        rewrite("bad", "2025-01-01T00:00:00Z", (["chat"], {"zero": 0})),
    ],
)


def test_the_older_object_wins_and_an_exact_match_before_one_for_all() -> None:
    drawn = Counter(OBJECTS.rewrite("chat") for _ in range(2_000))
    assert drawn.keys() == {"a", "b"} and 0.65 < drawn["b"] / 2_000 < 0.85
    assert OBJECTS.rewrite("any") == "default"
    assert PoolObjects().rewrite("any") == "any"


def test_what_can_not_be_read_is_named_and_left_out() -> None:
    assert len(WRONG) == 2
    assert "InferenceObjective" in WRONG[0]
    assert "InferenceModelRewrite 'bad'" in WRONG[1] and "weight" in WRONG[1] and "expected" in WRONG[1]


@pytest.mark.parametrize(
    ("name", "priority"), [("fast", -10), ("batch", 3), ("unset", 0), ("far", 0), ("nosuch", 0), (None, None)]
)
@pytest.mark.parametrize("header", ["x-gateway-inference-objective", "x-llm-d-inference-objective"])
async def test_an_objectives_higher_priority_is_earlier_in_line(
    header: str, name: str | None, priority: int | None
) -> None:
    asked = await AskedRequest.read(head(**({header: name} if name else {})), b"{}", OBJECTS, TRUST)
    untrusted = await AskedRequest.read(head(**({header: name} if name else {})), b"{}", OBJECTS, SenderTrust())
    assert untrusted.priority is None, "a client says so itself"
    assert asked.priority == priority
    assert asked.labels.priority == -(priority or 0)


async def test_a_rewritten_request_names_the_engines_model_and_nothing_else_changes() -> None:
    given = {"model": "any", "prompt": "é\u2028", "max_tokens": 3, "stream": True}
    asked = await AskedRequest.read(head(), json.dumps(given).encode(), OBJECTS, SenderTrust())
    assert asked.renaming == Renaming("default", "any") and asked.changed is not None
    assert json.loads(asked.changed) == {**given, "model": "default"}
    assert asked.call.text is not None and asked.call.text.model == "default"
    assert (asked.labels.model, asked.labels.target) == ("any", "default")
    untouched = b'{"model":  "any", "prompt": [1]}'
    assert (await AskedRequest.read(head(), untouched, PoolObjects(), SenderTrust())).changed is None


@pytest.mark.parametrize("space", ["", " "])
@pytest.mark.parametrize("cut", [1, 7, 1_000])
def test_the_answer_names_the_clients_model(space: str, cut: int) -> None:
    event = f'data: {{"model":{space}"default","choices":[{{"text":"\\"model\\":\\"default\\""}}]}}\n\n'.encode()
    expected = event.replace(b'"default"', b'"any"', 1)
    for kind, body, wanted in (
        (b"text/event-stream", event * 3, expected * 3),
        (b"application/json", event[6:-2], expected[6:-2]),
        (b"text/plain", event, event),
    ):
        reader = AnswerReader(None, hides_usage=False, renaming=Renaming("default", "any"))
        reader.begin(200, [(b"content-type", kind)])
        assert reader.changes_length is (kind == b"application/json")
        parts = [body[at : at + cut] for at in range(0, len(body), cut)]
        passed = b"".join(reader.feed(part, last=number == len(parts) - 1) for number, part in enumerate(parts))
        assert passed == wanted


async def test_objects_are_read_as_the_pods_service_account_and_kept_while_the_api_is_away(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found = {
        "inferenceobjectives": [objective("fast", 10), {"metadata": {"name": "bad"}, "spec": {}}],
        "inferencemodelrewrites": [rewrite("r", "2026-01-01T00:00:00Z", (["chat"], {"a": 1}))],
    }
    namespace = Namespace(tmp_path, {"llm-d.ai/v1alpha2": found})
    async with namespace.open() as api:
        objects = ExtensionObjects(api, "llm-d.ai", "pool")
        for _ in range(2):
            await objects.read()
            assert objects.current.priorities == {"fast": 10} and objects.current.rewrite("chat") == "a"
        assert len(caplog.messages) == 1 and "InferenceObjective 'bad' is left out" in caplog.messages[0]
        namespace.status = 503
        await objects.read()
        assert "keeping the last value" in caplog.messages[-1] and objects.current.priorities == {"fast": 10}


async def test_outside_a_pod_the_setting_is_a_mistake(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(SettingsError, match="KUBERNETES_SERVICE_HOST is not set"):
        async with open_kubernetes_api():
            pass
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    with pytest.raises(SettingsError, match=r"ca\.crt can't be read: No such file"):
        async with open_kubernetes_api(tmp_path):
            pass
