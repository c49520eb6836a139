"""The size of the KV that a model's tokens take."""

from dataclasses import dataclass
from enum import Enum

from kvatlas.errors import InvalidValue


class DataType(Enum):
    """Storage type of an element of a key or value."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    FP8 = "fp8"
    INT8 = "int8"

    @property
    def bytes(self) -> int:
        """Bytes of one element."""
        return {DataType.FLOAT32: 4, DataType.FLOAT16: 2, DataType.BFLOAT16: 2}.get(self, 1)


@dataclass(frozen=True, slots=True)
class KVGeometry:
    """The shape of one token's keys and values. The default is a model like Llama 3 8B: 128 KiB per token."""

    layers: int = 32
    heads: int = 8
    """KV heads: fewer than attention heads if the model groups queries."""
    head_size: int = 128
    data_type: DataType = DataType.BFLOAT16

    def __post_init__(self) -> None:
        for name in ("layers", "heads", "head_size"):
            if getattr(self, name) < 1:
                raise InvalidValue(f"{name} is {getattr(self, name)}; expected at least 1")

    def bytes_of(self, tokens: int) -> int:
        """Bytes of the keys and values: 2 × layers × heads × head size × tokens × bytes of the data type."""
        return 2 * self.layers * self.heads * self.head_size * tokens * self.data_type.bytes
