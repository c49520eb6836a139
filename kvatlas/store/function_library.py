"""A library of server-side functions, made of a folder of Lua files."""

from collections.abc import Sequence
from pathlib import Path


def function_library(name: str, folder: Path, shared: Sequence[str]) -> str:
    """One library of a folder's `.lua` files: `shared` first, in this order (their locals serve the rest), then the others,
    a file a command."""
    commands = sorted(path.stem for path in folder.glob("*.lua") if path.stem not in shared)
    return "\n".join([f"#!lua name={name}", *((folder / f"{stem}.lua").read_text() for stem in (*shared, *commands))])
