"""Several devices: preference, moves, rebalancing; and random use, compared with a table of where each sequence is."""

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule

from kvatlas.errors import InvalidValue
from kvatlas_simulator.cache import (
    AllocationRequest,
    DeviceCaches,
    InsufficientBlocks,
    KVCache,
    Priority,
    SequenceExists,
    UnknownDevice,
)

SIZE = 2


def make_devices(*num_blocks: int) -> DeviceCaches:
    """`gpu:0`, `gpu:1` and so on, with blocks of 2 tokens."""
    return DeviceCaches(
        {
            f"gpu:{number}": KVCache(num_blocks=blocks, block_size=SIZE, num_cpu_blocks=4)
            for number, blocks in enumerate(num_blocks)
        }
    )


def test_a_preferred_device_is_taken_if_it_has_room_and_else_the_one_with_most_left() -> None:
    devices = make_devices(4, 8, 6)
    devices.allocate(AllocationRequest("a", range(6)), preferred=["gpu:0", "gpu:2"])
    devices.allocate(AllocationRequest("b", range(50, 56)), preferred=["gpu:0", "gpu:2"])
    devices.allocate(AllocationRequest("c", range(70, 76)), preferred=["gpu:0"])
    assert [devices.device_of(name) for name in "abc"] == ["gpu:0", "gpu:2", "gpu:1"]
    devices.extend("c", [1])
    devices.free("a")
    assert devices.stats()["gpu:1"].utilisation == 0.5 and devices.stats()["gpu:0"].utilisation == 0


def test_what_no_device_can_do_is_refused_in_a_sentence() -> None:
    devices = make_devices(2, 3)
    devices.allocate(AllocationRequest(1, range(3)), preferred=["gpu:1"])
    with pytest.raises(InsufficientBlocks, match="insufficient blocks: need 3, have 2"):
        devices.allocate(AllocationRequest(2, range(6, 12)))
    with pytest.raises(SequenceExists, match="sequence 1 exists already"):
        devices.allocate(AllocationRequest(1, [1]), preferred=["gpu:0"])
    with pytest.raises(UnknownDevice, match="device gpu:9 not found; expected one of gpu:0, gpu:1"):
        devices.move(1, "gpu:9")
    with pytest.raises(InvalidValue, match="block sizes differ: 2, 4"):
        DeviceCaches({"a": KVCache(num_blocks=1, block_size=2), "b": KVCache(num_blocks=1, block_size=4)})


def test_a_move_takes_content_and_priority_along_and_leaves_the_cached_blocks() -> None:
    devices = make_devices(4, 4)
    request = AllocationRequest(1, range(7), priority=Priority.HIGH)
    devices.allocate(request, preferred=["gpu:0"])
    move = devices.move(1, "gpu:1")
    assert (move.source, move.target, move.blocks) == ("gpu:0", "gpu:1", 4)
    assert devices.cache_of(1).request_of(1).priority is Priority.HIGH
    assert devices.cache_of(1).read(1) == list(range(7))
    left = devices.cache("gpu:0")
    assert left.utilisation == 0 and left.match(range(7), request.namespace).hit_tokens == 6


def test_rebalancing_moves_the_least_important_sequences_off_the_fullest_device() -> None:
    devices = make_devices(8, 8)
    for name, priority in (("high", Priority.HIGH), ("low", Priority.LOW), ("normal", Priority.NORMAL)):
        tokens = [hash(priority) * 10 + number for number in range(4)]
        devices.allocate(AllocationRequest(name, tokens, priority=priority), preferred=["gpu:0"])
    assert [(move.sequence_id, move.target) for move in devices.rebalance()] == [("low", "gpu:1")]
    assert not devices.rebalance()


class DevicesMachine(RuleBasedStateMachine):
    names: Bundle[int] = Bundle("names")

    @initialize(num_blocks=st.lists(st.integers(1, 6), min_size=1, max_size=3))
    def start(self, num_blocks: list[int]) -> None:
        self.devices = make_devices(*num_blocks)
        self.tokens: dict[int, list[int]] = {}
        self.places: dict[int, str] = {}
        self.next_name = 0

    @rule(target=names, prompt=st.lists(st.integers(0, 1), min_size=1, max_size=7), preference=st.integers(0, 2))
    def allocate(self, prompt: list[int], preference: int) -> int:
        self.next_name += 1
        names = self.devices.devices
        preferred = names[preference % len(names)]
        request = AllocationRequest(self.next_name, prompt)
        fits = {name for name in names if self.devices.cache(name).can_allocate(request)}
        assert self.devices.can_allocate(request) == bool(fits)
        try:
            self.devices.allocate(request, preferred=[preferred])
        except InsufficientBlocks:
            assert not fits
        else:
            place = self.devices.device_of(self.next_name)
            assert place in fits and (place == preferred or preferred not in fits)
            self.tokens[self.next_name], self.places[self.next_name] = prompt, place
        return self.next_name

    @rule(name=names, device=st.integers(0, 2))
    def move(self, name: int, device: int) -> None:
        if name in self.tokens:
            target = self.devices.devices[device % len(self.devices.devices)]
            fits = self.devices.cache(target).can_allocate(AllocationRequest(name, self.tokens[name]))
            try:
                move = self.devices.move(name, target)
            except InsufficientBlocks:
                assert not fits
            else:
                assert (move.source, move.target) == (self.places[name], target)
                self.places[name] = target

    @rule()
    def rebalance(self) -> None:
        before = max(stats.utilisation for stats in self.devices.stats().values())
        for move in self.devices.rebalance():
            assert self.places[int(move.sequence_id)] == move.source
            self.places[int(move.sequence_id)] = move.target
        assert max(stats.utilisation for stats in self.devices.stats().values()) <= before

    @rule(name=names)
    def free(self, name: int) -> None:
        if self.tokens.pop(name, None) is not None:
            self.devices.free(name)
            del self.places[name]

    @invariant()
    def each_sequence_is_on_one_device_with_its_content(self) -> None:
        for device in self.devices.devices:
            cache = self.devices.cache(device)
            assert set(cache.sequence_ids) == {name for name, place in self.places.items() if place == device}
        for name, tokens in self.tokens.items():
            assert self.devices.cache_of(name).read(name) == tokens


TestDevices = DevicesMachine.TestCase
TestDevices.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
