"""Bytes per token from models' configurations equal what their engines report."""

import json
from pathlib import Path
from typing import Any

import pytest

from kvatlas.blocks.block_sizes import BlockSizes
from kvatlas.errors import InvalidValue, SettingsError
from kvatlas.fleet.records import EngineKind
from kvatlas.settings import PublishSettings
from kvatlas_publishers.engines.kv_geometry import read_token_bytes, token_bytes_of
from kvatlas_publishers.ledger.engine_groups import ReuseOfGroups
from kvatlas_publishers.settings import PublisherSettings

LLAMA_8B: dict[str, Any] = {
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "torch_dtype": "bfloat16",
}
DEEPSEEK_V3 = {"num_hidden_layers": 61, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "torch_dtype": "bfloat16"}


@pytest.mark.parametrize(
    ("config", "dtype", "expected"),
    [
        (LLAMA_8B, "auto", 2 * 32 * 8 * 128 * 2),
        (LLAMA_8B, "fp8", 2 * 32 * 8 * 128),
        ({**LLAMA_8B, "head_dim": 64}, "auto", 2 * 32 * 8 * 64 * 2),
        ({**LLAMA_8B, "num_key_value_heads": None}, "auto", 2 * 32 * 32 * 128 * 2),
        ({**LLAMA_8B, "multi_query": True}, "auto", 2 * 32 * 128 * 2),
        ({"text_config": LLAMA_8B, "torch_dtype": "float32"}, "auto", 2 * 32 * 8 * 128 * 2),
        ({**LLAMA_8B, "torch_dtype": None, "dtype": "torch.float32"}, "auto", 2 * 32 * 8 * 128 * 4),
        (DEEPSEEK_V3, "auto", 61 * 576 * 2),
        ({**LLAMA_8B, "layer_types": ["linear_attention"] * 24 + ["full_attention"] * 8}, "auto", 2 * 8 * 8 * 128 * 2),
        ({**LLAMA_8B, "full_attention_interval": 4}, "auto", 2 * 8 * 8 * 128 * 2),
    ],
)
def test_bytes_a_token_follow_from_the_geometry(config: dict[str, Any], dtype: str, expected: int) -> None:
    assert token_bytes_of(config, dtype) == expected


@pytest.mark.parametrize(
    ("config", "line"),
    [
        ([], "expected a model's configuration"),
        ({**LLAMA_8B, "num_hidden_layers": None}, "num_hidden_layers is None; expected a number from 1"),
        ({**LLAMA_8B, "num_hidden_layers": -3}, "num_hidden_layers is -3"),
        ({**LLAMA_8B, "hidden_size": 1 << 40}, "hidden_size is"),
        ({**LLAMA_8B, "num_hidden_layers": 1 << 31}, "bytes of KV cache per token; expected 1 to"),
        ({**LLAMA_8B, "layer_types": ["mamba"]}, "0 bytes of KV cache per token"),
        ({**LLAMA_8B, "torch_dtype": "int4"}, "data type 'int4'"),
    ],
)
def test_what_can_not_be_computed_is_one_line(config: Any, line: str) -> None:
    with pytest.raises(InvalidValue, match=line):
        token_bytes_of(config)


def test_a_file_or_its_folder_is_read_and_a_mistake_names_it(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    assert read_token_bytes(tmp_path) == read_token_bytes(tmp_path / "config.json") == 131_072
    (tmp_path / "bad.json").write_text("{")
    for name, line in (("bad.json", "set --block-bytes instead"), ("none.json", "No such file")):
        with pytest.raises(SettingsError, match=line) as caught:
            read_token_bytes(tmp_path / name)
        assert str(caught.value).startswith(f"--model-config-path {tmp_path / name}: ")


def test_a_publisher_knows_its_blocks_size_when_it_knows_their_tokens(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    settings = PublisherSettings.of(
        PublishSettings(
            engine=EngineKind.VLLM,
            endpoint="tcp://127.0.0.1:1",
            worker_id="w",
            model_id="m",
            model_config_path=tmp_path,
        )
    )
    assert settings.ledger.block_bytes_of(None) == 0
    assert settings.ledger.block_bytes_of(16) == 16 * 131_072
    assert (
        settings.endpoint(16, BlockSizes(16, settings.ledger.block_bytes_of(16)), ReuseOfGroups()).block_bytes
        == 2 << 20
    )
