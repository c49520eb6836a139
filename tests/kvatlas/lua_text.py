"""The constants in Lua files, to compare them with Python's."""

import re

_CONSTANTS = re.compile(r"^local ([A-Z][A-Z0-9_]*(?:, [A-Z][A-Z0-9_]*)*) = (\d+(?:, \d+)*)(?: |$)", re.MULTILINE)


def constants(text: str) -> dict[str, int]:
    """Every `local NAME, NAME... = number, number...` at the top level."""
    found: dict[str, int] = {}
    for names, numbers in _CONSTANTS.findall(text):
        found.update(zip(names.split(", "), map(int, numbers.split(", ")), strict=True))
    return found


def words(text: str, name: str) -> list[str]:
    """The quoted words of the table `local NAME = { ... }`, in order."""
    [table] = re.findall(rf"^local {name} = \{{(.*?)\}}", text, re.MULTILINE | re.DOTALL)
    return re.findall(r"'(\w+)'", table)


def numbers(text: str, name: str) -> dict[str, int]:
    """The table `local NAME = { key = number, ... }`."""
    [table] = re.findall(rf"^local {name} = \{{(.*?)\}}", text, re.MULTILINE | re.DOTALL)
    return {key: int(number) for key, number in re.findall(r"(\w+) = (\d+)", table)}
