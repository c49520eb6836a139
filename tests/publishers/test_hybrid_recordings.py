"""The rules of reuse against what vLLM 0.33's own KV cache manager reused, for every prompt of every recording."""

from pathlib import Path

import pytest

from tests.publishers.hybrid_recordings import FILES, Batch, HybridRecording, Repoint, read_hybrid_recording
from tests.publishers.naive_reuse import DEVICE, Group, NaiveReuse


def naive_reuse_of(recording: HybridRecording) -> NaiveReuse:
    """With what no event says: the chunk size, and that full attention is the EAGLE group."""
    groups = {}
    for index, described in enumerate(recording.groups):
        kind, _, size = described.partition(":")
        groups[index] = Group(eagle=recording.eagle and kind == "full", chunk=int(size) if kind == "chunked" else None)
    return NaiveReuse(recording.block_size, groups)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name.removesuffix(".jsonl.gz"))
def test_the_rules_predict_every_hit_of_the_engine(path: Path) -> None:
    recording = read_hybrid_recording(path)
    model = naive_reuse_of(recording)
    predicted, real = [], []
    for step in recording.steps:
        if isinstance(step, Batch):
            model.fold(step.payload)
        elif isinstance(step, Repoint):
            model.adapter_path = step.path
        else:
            real.append((step.hit, step.far))
            near, hit = (
                0
                if step.skip
                else model.reusable(step.tokens, step.adapter, lookahead=recording.lookahead, media=media)
                for media in ((DEVICE,), (DEVICE, "CPU"))
            )
            predicted.append((hit, hit - near))
    assert predicted == real
    assert any(hit for hit, _ in real)


def test_the_recordings_tell_rules_apart() -> None:
    """Residency of full attention alone mispredicts most hybrids: else the recordings would prove nothing."""
    wrong = {}
    for path in FILES:
        recording = read_hybrid_recording(path)
        model = naive_reuse_of(recording)
        count = 0
        for step in recording.steps:
            if isinstance(step, Batch):
                model.fold(step.payload)
                continue
            if isinstance(step, Repoint):
                continue
            sparse = {index: group for index, group in model.groups.items() if group.kind != "full_attention"}
            for index in sparse:
                del model.groups[index]
            count += model.reusable(step.tokens, step.adapter, lookahead=recording.lookahead) != step.hit
            model.groups.update(sparse)
        wrong[recording.name] = count
    assert {name for name, count in wrong.items() if not count} == {"eagle", "eagle-lookahead", "full"}
    assert wrong["swa128-forks"] > 20
