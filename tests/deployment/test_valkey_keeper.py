"""The keeper makes a cluster of real servers, and keeps it one."""

from types import ModuleType
from typing import Any

import pytest

from kvatlas.embedded.valkey import ValkeyProcess
from tests.deployment.production_servers import made_whole


@pytest.fixture
def servers(keeper: ModuleType, valkeys: list[ValkeyProcess]) -> list[Any]:
    """What the keeper knows of each, after it made them one cluster."""
    return made_whole(keeper, valkeys)


def shape(servers: list[Any]) -> list[int]:
    """How many replicas each primary has, after all slots were found served."""
    owners = [server for server in servers if server.own.slots]
    served = sum(last - first + 1 for server in owners for first, last in server.own.slots)
    assert served == 16_384
    return [sum(server.own.primary == owner.node_id for server in servers) for owner in owners]


def test_six_strangers_become_three_primaries_with_a_replica_each(servers: list[Any]) -> None:
    assert shape(servers) == [1, 1, 1]


def test_a_server_that_lost_its_disk_comes_back_as_a_replica(
    keeper: ModuleType, servers: list[Any], valkeys: list[ValkeyProcess]
) -> None:
    lost = next(process for process, server in zip(valkeys, servers, strict=True) if server.own.slots)
    before = {server.node_id for server in servers}
    lost.kill()
    (lost.data_dir / "nodes.conf").unlink()
    lost.start()
    servers = made_whole(keeper, valkeys)
    assert shape(servers) == [1, 1, 1]
    now = {server.node_id for server in servers}
    assert len(before & now) == 5
    assert all(set(server.seen) == now for server in servers), "the dead one is known no more"


def test_servers_that_all_lost_each_others_addresses_find_together(
    keeper: ModuleType, servers: list[Any], valkeys: list[ValkeyProcess]
) -> None:
    nodes = {server.node_id for server in servers}
    for process in valkeys:
        process.kill()
    for process in valkeys:  # as after a restart of all pods: each knows who the others are, none knows where
        file = process.data_dir / "nodes.conf"
        lines = [_elsewhere(line) for line in file.read_text().splitlines()]
        file.write_text("\n".join(lines) + "\n")
        process.start()
    servers = made_whole(keeper, valkeys)
    assert {server.node_id for server in servers} == nodes
    assert shape(servers) == [1, 1, 1]


def _elsewhere(line: str) -> str:
    """A line of nodes.conf, with an address where nobody is."""
    node_id, address, *rest = line.split(" ")
    if address.startswith("127.") and "myself" not in line:
        address = "127.0.0.2:1@10001" + ("," + address.partition(",")[2] if "," in address else "")
    return " ".join([node_id, address, *rest])
