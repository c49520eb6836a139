"""Engines' answers are compared with predictions: why they deviate, and which findings need attention."""

import pytest

from kvatlas.predictions.accuracy import ENOUGH_ANSWERS, AnswerReport, Deviation, Prediction, deviation
from kvatlas_router.tokens import Usage
from router_client.learning.prediction_accuracy import PredictionAccuracy

KNOWN = Prediction(100, cached_tokens=80, unconfirmed_tokens=32)


@pytest.mark.parametrize(
    ("predicted", "prompt", "cached", "why"),
    [
        (KNOWN, 100, 80, Deviation.NONE),
        (KNOWN, 100, 96, Deviation.NEWER),
        (KNOWN, 100, 64, Deviation.UNCONFIRMED),
        (KNOWN, 100, 48, Deviation.UNCONFIRMED),
        (KNOWN, 100, 32, Deviation.EVICTED),
        (KNOWN, 101, 32, Deviation.OTHER_TOKENS),
        (Prediction(100, by_index=False), 100, 64, Deviation.WITHOUT_INDEX),
        (Prediction(100, by_index=False), 100, 0, Deviation.NONE),
        (Prediction(100, 80, bounded=True), 100, 16, Deviation.BOUNDED),
        (Prediction(100, 80, bounded=True), 100, 96, Deviation.BOUNDED),
        (Prediction(100, 80, bounded=True), 100, 80, Deviation.NONE),
    ],
)
def test_a_deviation_has_one_reason(predicted: Prediction, prompt: int, cached: int, why: Deviation) -> None:
    assert deviation(predicted, prompt, cached) is why


def test_answers_are_counted_in_total_and_by_pool() -> None:
    accuracy = PredictionAccuracy()
    assert accuracy.findings() == [] and accuracy.reports() == {}
    usage = Usage.of({"usage": {"prompt_tokens": 100, "completion_tokens": 1}})
    assert usage is not None and Usage.of({"usage": None}) is None and Usage.of([]) is None
    accuracy.count("a", KNOWN, usage)
    (finding,) = accuracy.findings()
    assert "--enable-prompt-tokens-details" in finding
    accuracy.count("a", KNOWN, Usage(100, 1, 80))
    accuracy.count("b", KNOWN, Usage(102, 1, 0))
    accuracy.count("b", Prediction(None), Usage(100, 1, 9))
    counts = accuracy.counts
    assert (counts.prompts_equal, counts.prompts_differ, counts.cached_untold) == (2, 1, 1)
    assert (counts.cached_equal, counts.by_deviation[Deviation.OTHER_TOKENS]) == (1, 1)
    assert (counts.predicted_tokens, counts.cached_tokens) == (160, 80)
    reports = accuracy.reports()
    assert (reports["a"].findings(), reports["b"].counts.prompts_differ) == ([], 1)
    (differs,) = accuracy.findings()
    assert "1 of 1 prompts differ" in differs and "102 tokens where the router counted 100" in differs
    assert AnswerReport.unpack(reports["b"].pack()) == reports["b"]


def test_many_wrong_predictions_are_a_finding_with_the_reason() -> None:
    accuracy = PredictionAccuracy()
    for number in range(ENOUGH_ANSWERS):
        accuracy.count("a", KNOWN, Usage(100, 1, 0 if number % 10 == 0 else 80))
    (finding,) = accuracy.findings()
    assert "5 of 50 answers" in finding and "evicted since the choice: 5" in finding and "too small" in finding


def test_upper_bounds_that_are_not_reached_are_no_finding() -> None:
    accuracy = PredictionAccuracy()
    for _ in range(100):
        accuracy.count("a", Prediction(100, 80, bounded=True), Usage(100, 1, 16))
    assert accuracy.counts.cached_bounded == 100 and accuracy.findings() == []
