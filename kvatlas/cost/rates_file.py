"""Rates files of the cost profile `engine`, as `kvatlas calibrate` writes them: a JSON object with the numeric fields of
`EngineRates`. Fields that are missing keep their defaults."""

import json
from dataclasses import fields
from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter, ValidationError

from kvatlas.cost.engine import EngineProfile, EngineRates
from kvatlas.cost.protocol import CostProfile
from kvatlas.cost.quillcache import QuillcacheProfile
from kvatlas.errors import SettingsError
from kvatlas.validation import describe_invalid

NAMES = (
    "prefill_us_per_token",
    "attention_us_per_token_pair",
    "tpot_base_us",
    "tpot_us_per_running",
    "tpot_us_per_kv_token",
)
_FILE = TypeAdapter(dict[str, Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]])


def read_rates(path: Path | None) -> EngineRates:
    """The rates in a file, or the defaults if there is no file. Raises SettingsError for a file without valid rates."""
    if path is None:
        return EngineRates()
    try:
        found = _FILE.validate_json(path.read_bytes())
    except OSError as error:
        raise SettingsError(f"--rates-file {path}: {error.strerror or error}") from error
    except ValidationError as error:
        raise SettingsError(f"--rates-file {path}: {describe_invalid(error, 'the file')}") from error
    if unknown := sorted(found.keys() - set(NAMES)):
        raise SettingsError(f"--rates-file {path}: {unknown[0]!r:.80} is not a rate; expected {', '.join(NAMES)}")
    return EngineRates(**found)  # type: ignore[arg-type]


def write_rates(path: Path, rates: EngineRates) -> None:
    """Write the rates to a file. Raises SettingsError for a path that can't be written to."""
    found = {name: getattr(rates, name) for name in (field.name for field in fields(rates)) if name in NAMES}
    try:
        path.write_text(json.dumps(found, indent=2) + "\n")
    except OSError as error:
        raise SettingsError(f"{path}: {error.strerror or error}") from error


def read_profile(name: str, rates_file: Path | None) -> CostProfile:
    """The cost profile with this name; `engine` takes its rates from the file. Raises SettingsError."""
    return EngineProfile(read_rates(rates_file)) if name == "engine" else QuillcacheProfile()
