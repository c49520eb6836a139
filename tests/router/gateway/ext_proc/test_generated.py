"""ext_proc_pb2.py is what protoc generates from ext_proc.proto."""

from pathlib import Path

import grpc_tools
from grpc_tools import protoc

ROOT = Path(__file__).parents[4]
PROTO = "kvatlas_router/gateway/ext_proc/ext_proc.proto"


def test_the_generated_module_is_up_to_date(tmp_path: Path) -> None:
    common = Path(grpc_tools.__file__).parent / "_proto"
    assert (
        protoc.main(["", f"-I{ROOT}", f"-I{common}", f"--python_out={tmp_path}", f"--pyi_out={tmp_path}", PROTO]) == 0
    )
    for suffix in ("_pb2.py", "_pb2.pyi"):
        name = PROTO.replace(".proto", suffix)
        assert (tmp_path / name).read_text() == (ROOT / name).read_text()
