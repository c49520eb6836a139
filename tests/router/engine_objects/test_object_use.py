"""The engine-kept objects that a request names."""

import json
from typing import Any

import pytest

from kvatlas_router.engine_objects.object_use import ObjectUse

NAMED: dict[str, tuple[str, dict[str, Any]]] = {
    "file of a chat": ("chat/completions", {"messages": [{"content": [{"type": "file", "file": {"file_id": "f1"}}]}]}),
    "document of a message": (
        "messages",
        {"messages": [{"content": [{"type": "document", "source": {"type": "file", "file_id": "f1"}}]}]},
    ),
    "document in a tool's result": (
        "messages",
        {
            "messages": [
                {"content": [{"type": "tool_result", "content": [{"type": "image", "source": {"file_id": "f1"}}]}]}
            ]
        },
    ),
    "upload to a container": ("messages", {"messages": [{"content": [{"type": "container_upload", "file_id": "f1"}]}]}),
    "file of a response": ("responses", {"input": [{"content": [{"type": "input_file", "file_id": "f1"}]}]}),
    "image of a response": ("responses", {"input": [{"content": [{"type": "input_image", "file_id": "f1"}]}]}),
    "search": ("responses", {"input": "a", "tools": [{"type": "file_search", "vector_store_ids": ["f1"]}]}),
    "interpreter": (
        "responses",
        {"input": "a", "tools": [{"type": "code_interpreter", "container": {"type": "auto", "file_ids": ["f1"]}}]},
    ),
    "batch": ("batches", {"input_file_id": "f1"}),
    "files of a vector store": ("vector_stores", {"file_ids": ["f1"]}),
    "batch of files": ("vector_stores/f1/file_batches", {"files": [{"file_id": "f1", "attributes": {}}]}),
    "conversation": ("responses", {"input": "a", "conversation": {"id": "f1"}}),
    "attachment": ("threads/runs", {"thread": {"messages": [{"content": "a", "attachments": [{"file_id": "f1"}]}]}}),
    "resource": ("assistants", {"tool_resources": {"file_search": {"vector_store_ids": ["f1"]}}}),
    "conversation's item": ("conversations/f1/items", {"items": []}),
}


@pytest.mark.parametrize("where", NAMED)
def test_an_object_is_found_wherever_a_request_names_it(where: str) -> None:
    path, asked = NAMED[where]
    use = ObjectUse.of("POST", f"/v1/{path}", json.dumps(asked).encode(), asked)
    assert use is not None and use.ids == ("f1",)


@pytest.mark.parametrize("where", NAMED)
def test_an_object_is_found_whatever_letters_of_its_field_are_escaped(where: str) -> None:
    path, asked = NAMED[where]
    body = json.dumps(asked).replace("_id", "\\u005fid").replace("conversation", "conv\\u0065rsation")
    use = ObjectUse.of("POST", f"/v1/{path}", body.encode())
    assert use is not None and use.ids == ("f1",)


@pytest.mark.parametrize(
    "part",
    [
        {"type": "tool_use", "name": "read", "input": {"type": "file", "file_id": "f1", "file": {"file_id": "f1"}}},
        {"type": "text", "text": '{"type": "file", "file_id": "f1"}'},
        {"type": "file", "file": {"file_id": {"type": "string"}, "file_data": "YQ=="}},
        {"type": ["file"], "file_id": "f1", "content": {"type": {"file_id": "f1"}}},
    ],
    ids=["call", "text", "schema", "no type"],
)
def test_a_clients_own_words_are_no_objects(part: dict[str, Any]) -> None:
    tool = {"name": "read", "input_schema": {"properties": {"file_id": {"type": "string"}}}}
    asked = {"messages": [{"content": [part]}], "tools": [tool], "metadata": {"file_id": "f1"}}
    assert ObjectUse.of("POST", "/v1/messages", json.dumps(asked).encode(), asked) is None
