"""Reads a prompt's token ids, or a request's hints, from a file or stdin."""

import json
import sys
from pathlib import Path
from typing import Any

from kvatlas.blocks.token_text import parse_tokens
from kvatlas.errors import InvalidValue

STDIN = "-"


def read_tokens(source: str) -> list[int]:
    """Token ids from a file, or from stdin for `-`; see `parse_tokens`. Raises InvalidValue, whose message names the
    file."""
    where, text = _read(source, "--tokens")
    try:
        return parse_tokens(text)
    except InvalidValue as error:
        raise InvalidValue(f"{where}: {error}") from error


def read_json(source: str, flag: str) -> Any:
    """A JSON value from a file, or from stdin for `-`. Raises InvalidValue, whose message names the flag and the
    file."""
    where, text = _read(source, flag)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:  # RecursionError: nested too deeply
        raise InvalidValue(f"{where}: not JSON: {error}") from error


def read_json_or_tokens(source: str, flag: str) -> Any:
    """A JSON object, or token ids (see `parse_tokens`). Raises InvalidValue, whose message names the flag and the
    file."""
    where, text = _read(source, flag)
    try:
        return json.loads(text) if text.lstrip().startswith("{") else parse_tokens(text)
    except InvalidValue as error:
        raise InvalidValue(f"{where}: {error}") from error
    except (ValueError, RecursionError) as error:
        raise InvalidValue(f"{where}: not JSON: {error}") from error


def _read(source: str, flag: str) -> tuple[str, str]:
    """Returns (flag and file, for error messages; text). Raises InvalidValue."""
    where = f"{flag} {'stdin' if source == STDIN else source}"
    try:
        return where, sys.stdin.read() if source == STDIN else Path(source).read_text()
    except OSError as error:
        raise InvalidValue(f"{where}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise InvalidValue(f"{where}: not text ({error.reason} at byte {error.start})") from error
