"""A wrong flag is one clear line."""

import pytest

from kvatlas.errors import SettingsError
from tests.simulator.running_engine import engine_settings


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"block_size": 0}, "--block-size is 0; expected"),
        ({"eviction": "mru"}, "--eviction is 'mru'; expected"),
        ({"model": "m", "adapters": "a,a"}, "--adapters is 'a,a'; expected names that differ"),
        ({"speed_up": 0}, "--speed-up is 0; expected"),
        (
            {"groups": "full,swa"},
            "--groups is 'full,swa'; expected full, swa:WINDOW, chunked:SIZE or mamba as a group, not 'swa'",
        ),
        (
            {"groups": "full,mamba", "num_cpu_blocks": 5},
            "--groups is 'full,mamba'; expected one group with --num-cpu-blocks",
        ),
        ({"groups": "full,chunked:9"}, "--groups is 'full,chunked:9'; expected chunks of a multiple of --block-size"),
        ({"groups": "full,mamba", "retention_interval": 9}, "--retention-interval is 9; expected a multiple of"),
        ({"groups": "swa:8,mamba"}, "--groups is 'swa:8,mamba'; expected exactly one group of full attention"),
        ({"endpoint": "5557"}, "--endpoint is '5557'; expected a URL"),
    ],
)
def test_a_wrong_flag_is_one_clear_line(flags: dict[str, object], message: str) -> None:
    with pytest.raises(SettingsError) as caught:
        engine_settings(**flags)
    assert str(caught.value).startswith(message)
