from kvatlas_publishers.stream.checkpoints import CheckpointClock, CheckpointSettings

SETTINGS = CheckpointSettings(every_messages=10, every_s=30, idle_s=2)


def test_without_a_change_no_checkpoint_is_due() -> None:
    clock = CheckpointClock(SETTINGS)
    assert clock.due_in(1e9) is None
    clock.record_messages(1, 0.0)
    clock.reset()
    assert clock.due_in(1e9) is None


def test_a_checkpoint_is_due_when_idle() -> None:
    clock = CheckpointClock(SETTINGS)
    clock.record_messages(1, 100.0)
    assert clock.due_in(100.0) == 2
    clock.record_messages(1, 101.0)
    assert clock.due_in(101.5) == 1.5
    assert clock.due_in(200.0) == 0


def test_a_checkpoint_is_due_after_some_time_however_busy() -> None:
    clock = CheckpointClock(SETTINGS)
    for second in range(9):
        clock.record_messages(1, 100.0 + second * 3.5)
    assert clock.due_in(129.0) == 1


def test_a_checkpoint_is_due_after_the_set_number_of_messages() -> None:
    clock = CheckpointClock(SETTINGS)
    clock.record_messages(9, 100.0)
    assert clock.due_in(100.0) == 2
    clock.record_messages(1, 100.0)
    assert clock.due_in(100.0) == 0
