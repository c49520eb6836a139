import pytest

from kvatlas.errors import SettingsError
from kvatlas_publishers.feed.endpoints import endpoint_of_rank, to_connect


@pytest.mark.parametrize(
    ("endpoint", "rank", "expected"),
    [
        ("tcp://127.0.0.1:5557", None, "tcp://127.0.0.1:5557"),
        ("tcp://127.0.0.1:5557", 0, "tcp://127.0.0.1:5557"),
        ("tcp://*:5557", 3, "tcp://*:5560"),
        ("tcp://[::1]:5557", 1, "tcp://[::1]:5558"),
        ("inproc://events", 2, "inproc://events_dp2"),
    ],
)
def test_ranks_count_ports_up(endpoint: str, rank: int | None, expected: str) -> None:
    assert endpoint_of_rank(endpoint, rank) == expected


@pytest.mark.parametrize("endpoint", ["ipc:///tmp/events", "tcp://host", "tcp://host:65535"])
def test_a_rank_without_a_port_is_one_clear_line(endpoint: str) -> None:
    with pytest.raises(SettingsError, match=endpoint):
        endpoint_of_rank(endpoint, 1)


def test_an_engines_wildcard_address_is_this_machine() -> None:
    assert to_connect("tcp://*:5557") == to_connect("tcp://0.0.0.0:5557") == "tcp://127.0.0.1:5557"
    assert to_connect("tcp://10.0.0.7:5557") == "tcp://10.0.0.7:5557"
