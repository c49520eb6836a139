"""Recognizes which engine wrote a batch, with recordings of both."""

import msgpack
import pytest

from kvatlas.fleet.records import EngineKind
from kvatlas_publishers.engines.decoder_check import kind_of_batch
from tests.publishers.fake_engine import RECORDINGS, recording

ALIKE = "vllm-0.11.1-array"
"""Its events have only fields that SGLang's first ones have too."""
NAMES = sorted(path.name.removesuffix(".jsonl.gz") for path in RECORDINGS.glob("*.jsonl.gz"))


@pytest.mark.parametrize("name", NAMES)
def test_recorded_batches_are_of_their_engine_or_of_either(name: str) -> None:
    right = EngineKind(name.partition("-")[0])
    found = {kind_of_batch(payload) for payload in recording(name)[1]}
    assert found - {None} == (set() if name == ALIKE else {right})


@pytest.mark.parametrize(
    ("event", "kind"),
    [
        (["BlockStored", [1], None, [1], 1, None, "GPU", None, "session", None], EngineKind.SGLANG),
        (["BlockStored", [1], None, [1], 1, None, "GPU", None, None, 0], EngineKind.VLLM),
        (["BlockStored", [b"h"], None, [1], 1, None], EngineKind.VLLM),
        (["BlockStored", [-1], None, [1], 1, None], None),
        ({"type": "BlockRemoved", "block_hashes": [-1], "medium": "GPU"}, EngineKind.SGLANG),
        (["AllBlocksCleared"], None),
        ("nonsense", None),
    ],
)
def test_what_only_one_engine_writes_names_it(event: object, kind: EngineKind | None) -> None:
    assert kind_of_batch(msgpack.packb([1.0, [event], 0])) is kind
