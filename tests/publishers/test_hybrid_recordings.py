"""The rules of reuse compared with what vLLM 0.33's own KV cache manager reused, for every prompt of every recording."""

from pathlib import Path

import pytest

from tests.publishers.hybrid_recordings import FILES, Batch, Repoint, read_hybrid_recording
from tests.publishers.naive_reuse import DEVICE

PREDICTED = [path for path in FILES if path.name != "gemma.jsonl.gz"]
"""All but the one whose events omit some hashes, so the naive model can't follow a prompt."""


@pytest.mark.parametrize("path", PREDICTED, ids=lambda path: path.name.removesuffix(".jsonl.gz"))
def test_the_rules_predict_every_hit_of_the_engine(path: Path) -> None:
    recording = read_hybrid_recording(path)
    model = recording.naive_reuse()
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
                else model.reusable(
                    step.tokens, step.adapter, lookahead=recording.lookahead, media=step.media, tiers=tiers
                )
                for tiers in ((DEVICE,), (DEVICE, "CPU"))
            )
            predicted.append((hit, hit - near))
    assert predicted == real
    assert any(hit for hit, _ in real)


def test_the_recordings_tell_rules_apart() -> None:
    """Residency of full attention alone mispredicts most hybrids; otherwise the recordings would prove nothing."""
    wrong = {}
    for path in PREDICTED:
        recording = read_hybrid_recording(path)
        model = recording.naive_reuse()
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
            found = model.reusable(step.tokens, step.adapter, lookahead=recording.lookahead, media=step.media)
            count += found != step.hit
            model.groups.update(sparse)
        wrong[recording.name] = count
    of_full_attention = {"dcp2-draft", "dcp4", "eagle", "eagle-lookahead", "full", "images-lookahead"}
    assert {name for name, count in wrong.items() if not count} == of_full_attention
    assert wrong["swa128-forks"] > 20
