from publishers.feed.distrust import Mistrust


def test_each_loss_is_answered_by_giving_up_while_there_is_ration_left() -> None:
    mistrust = Mistrust(burst=3, ration_s=10)
    assert [mistrust.lost(0.0) for _ in range(2)] == [True, True]
    assert mistrust.listening(0.0)


def test_with_the_last_ration_it_gives_up_and_listens_no_more() -> None:
    mistrust = Mistrust(burst=2, ration_s=10)
    assert [mistrust.lost(0.0) for _ in range(4)] == [True, True, False, False]
    assert not mistrust.listening(9.9)
    assert mistrust.listening(10.1)


def test_it_listens_again_when_there_is_one_more_and_gives_up_at_the_next_loss() -> None:
    mistrust = Mistrust(burst=2, ration_s=10)
    answers = [mistrust.lost(float(second)) for second in range(100)]
    assert sum(answers) == 2 + 9
    assert not mistrust.listening(100.0) or mistrust.lost(100.0)


def test_rare_losses_are_all_answered() -> None:
    mistrust = Mistrust(burst=2, ration_s=10)
    assert all(mistrust.lost(20.0 * nth) for nth in range(50))
