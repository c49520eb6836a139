"""`dataclass` for values that each request makes. With `frozen=True`, only type checkers keep anyone from assigning to a field.

The standard library's frozen dataclasses set each field by `object.__setattr__`. A small chat sets 250 of them, which took 11 %
of the proxy's instructions for it.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass
else:
    import dataclasses

    def dataclass(*, frozen: bool = False, eq: bool = True, **options: Any) -> Any:
        """Like `dataclasses.dataclass`; frozen ones have a hash, but can be changed."""
        return dataclasses.dataclass(eq=eq, unsafe_hash=frozen and eq, **options)
