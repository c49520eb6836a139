"""`dataclass` and `replace` for values that are created for each request.

With `frozen=True`, only type checkers keep anyone from assigning to a field: the standard library's frozen dataclasses set each
field by `object.__setattr__`. A small chat sets 250 of them; that took 11% of the proxy's instructions for it.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass
    from dataclasses import replace as replace
else:
    import dataclasses
    from functools import cache
    from operator import attrgetter

    def dataclass(*, frozen: bool = False, eq: bool = True, **options: Any) -> Any:
        """Like `dataclasses.dataclass`, except that `frozen` only adds a hash and does not prevent assignment."""
        return dataclasses.dataclass(eq=eq, unsafe_hash=frozen and eq, **options)

    def replace(value: Any, **changes: Any) -> Any:
        """Like `dataclasses.replace`, but does not check each field. For classes with two fields or more."""
        names, read = _fields_of(type(value))
        return type(value)(**(dict(zip(names, read(value), strict=True)) | changes))

    @cache
    def _fields_of(kind: type) -> Any:
        """The names of the fields that the class's constructor takes, and a function that reads these fields."""
        names = tuple(field.name for field in dataclasses.fields(kind) if field.init)
        return names, attrgetter(*names)
