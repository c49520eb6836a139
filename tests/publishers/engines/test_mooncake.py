"""Events of Mooncake's master: golden bytes as its publisher packs them, and objects that can't be tied to a prompt."""

from typing import Any

import msgpack
import pytest

from kvatlas.errors import EngineEventError
from kvatlas.fleet.records import EngineKind
from kvatlas.identity import Scope
from kvatlas_publishers.engine_events import EngineBatch, EngineCleared, EngineRemoved, EngineStored
from kvatlas_publishers.engines import decode_batch
from kvatlas_publishers.engines.mooncake import TIER, ObjectName
from kvatlas_publishers.ledger.settings import LedgerSettings
from kvatlas_publishers.shared_store.receiver import objects_of

GOLDEN = bytes.fromhex(
    "93cf000001a0c4506c0093de0014a86576656e745f696401a974696d657374616d70cf000001a0c4506c00aa6576656e745f74797065a6"
    "73746f726564a474797065ab426c6f636b53746f726564aa6d6f64656c5f6e616d65c0aa626c6f636b5f73697a65c0af6164646974696f"
    "6e616c5f73616c74c0a96c6f72615f6e616d65c0a974656e616e745f6964a764656661756c74aa6261636b656e645f6964a6706f6f6c2d"
    "61a867726f75705f6964c0a66d656469756da3637075a764705f72616e6bc0aa6f626a6563745f6b6579b4313638363334343334313937"
    "3830373731343634aa7365715f68617368657391cfea06fc71a5ee6e88ac626c6f636b5f68617368657391d3ea06fc71a5ee6e88ae6261"
    "73655f626c6f636b5f69647800ab706172656e745f68617368c0a9746f6b656e5f696473c0b1706172656e745f626c6f636b5f68617368"
    "c0de0014a86576656e745f696402a974696d657374616d70cf000001a0c4506c00aa6576656e745f74797065a673746f726564a4747970"
    "65ab426c6f636b53746f726564aa6d6f64656c5f6e616d65c0aa626c6f636b5f73697a65c0af6164646974696f6e616c5f73616c74c0a9"
    "6c6f72615f6e616d65c0a974656e616e745f6964a764656661756c74aa6261636b656e645f6964a6706f6f6c2d61a867726f75705f6964"
    "c0a66d656469756da3637075a764705f72616e6bc0aa6f626a6563745f6b6579b4653362306334343239386663316331345f305f6baa73"
    "65715f68617368657390ac626c6f636b5f68617368657390ae626173655f626c6f636b5f69647800ab706172656e745f68617368c0a974"
    "6f6b656e5f696473c0b1706172656e745f626c6f636b5f68617368c0de0011a86576656e745f696403a974696d657374616d70cf000001"
    "a0c4506c00aa6576656e745f74797065a772656d6f766564a474797065ac426c6f636b52656d6f766564aa6d6f64656c5f6e616d65c0aa"
    "626c6f636b5f73697a65c0af6164646974696f6e616c5f73616c74c0a96c6f72615f6e616d65c0a974656e616e745f6964a76465666175"
    "6c74aa6261636b656e645f6964a6706f6f6c2d61a867726f75705f6964c0a66d656469756da3637075a764705f72616e6bc0aa6f626a65"
    "63745f6b6579b2307865613036666337316135656536653838aa7365715f68617368657391cfea06fc71a5ee6e88ac626c6f636b5f6861"
    "7368657391d3ea06fc71a5ee6e88ae626173655f626c6f636b5f696478c000"
)
"""Field for field as mooncake_master packs it with its default flags: an object stored by its sequence hash, one by an engine's
own key, and the first one evicted."""
HASH = 16863443419780771464
NAME = ObjectName("", "", "default", HASH.to_bytes(8, "little"))


def decode(*events: Any) -> EngineBatch:
    return decode_batch(EngineKind.STORE, msgpack.packb([1_790_000_000_000, list(events), 0]))


def event(kind: str = "removed", **changed: Any) -> dict[str, Any]:
    return {"event_type": kind, "tenant_id": "default", "seq_hashes": [HASH], **changed}


def test_the_masters_bytes_are_read() -> None:
    batch = decode_batch(EngineKind.STORE, GOLDEN)
    assert batch.events == [EngineStored([NAME.pack()], None, (), 0, TIER), EngineRemoved([NAME.pack()], TIER)]
    assert (batch.ts, batch.lost) == (1_790_000_000.0, False)
    assert batch.skipped == [
        "stored object 'e3b0c44298fc1c14_0_k': its key is not a sequence hash, so its block is unknown"
    ]


def test_a_cleared_event_and_names_of_model_and_adapter_are_read() -> None:
    batch = decode(event("cleared"), event(model_name="m", lora_name="sql", tenant_id=None))
    assert batch.events[0] == EngineCleared((TIER,))
    assert isinstance(batch.events[1], EngineRemoved)
    [name] = batch.events[1].hashes
    assert isinstance(name, bytes) and ObjectName.unpack(name) == ObjectName("m", "sql", "", NAME.hash)


@pytest.mark.parametrize(
    ("raw", "lost"),
    [
        (event(seq_hashes=[]), False),
        (event("stored", seq_hashes="x"), False),
        (event(seq_hashes=[-1]), True),
        (event("moved"), True),
        (event(tenant_id=7), True),
        (7, True),
    ],
)
def test_an_event_that_cant_be_read_is_skipped_and_a_removal_makes_all_before_it_unknown(raw: Any, lost: bool) -> None:
    batch = decode(event("stored"), raw)
    assert len(batch.skipped) == 1 and batch.lost is lost and len(batch.events) == (0 if lost else 1)


@pytest.mark.parametrize("payload", [b"", b"\xc1", msgpack.packb([1.5]), msgpack.packb(["now", [], 0])])
def test_another_payload_is_refused_in_one_line(payload: bytes) -> None:
    with pytest.raises(EngineEventError) as refused:
        decode_batch(EngineKind.STORE, payload)
    assert "\n" not in str(refused.value)


def test_objects_become_names_of_the_stores_own_ledger() -> None:
    settings = LedgerSettings("m", "t", block_size=16)
    scope_id = Scope("m", "t").scope_id
    batch = objects_of(decode(event(), event(model_name="m"), event(model_name="n"), event(tenant_id="acme")), settings)
    names = [list(one.hashes) for one in batch.events if isinstance(one, EngineRemoved)]
    assert names == [[scope_id + NAME.hash], [scope_id + NAME.hash], [], []]
    assert len(batch.skipped) == 2
    by_tenant = LedgerSettings("m", "t", block_size=16, salt_is_tenant=True)
    [one] = objects_of(decode(event(tenant_id="acme")), by_tenant).events
    assert isinstance(one, EngineRemoved) and one.hashes == [Scope("m", "t", None, "acme").scope_id + NAME.hash]
