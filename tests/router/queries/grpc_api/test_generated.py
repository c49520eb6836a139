"""The generated modules are what protoc generates from the .proto files."""

from pathlib import Path

import grpc_tools
import pytest
from grpc_tools import protoc

ROOT = Path(__file__).parents[4]


@pytest.mark.parametrize("name", ["index", "kv_indexer", "radix_index"])
def test_the_generated_module_is_up_to_date(tmp_path: Path, name: str) -> None:
    proto = f"kvatlas_router/queries/grpc_api/{name}.proto"
    common = Path(grpc_tools.__file__).parent / "_proto"
    assert (
        protoc.main(["", f"-I{ROOT}", f"-I{common}", f"--python_out={tmp_path}", f"--pyi_out={tmp_path}", proto]) == 0
    )
    for suffix in ("_pb2.py", "_pb2.pyi"):
        made = proto.replace(".proto", suffix)
        assert (tmp_path / made).read_text() == (ROOT / made).read_text()
