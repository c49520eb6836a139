"""Reports the outcomes of all scenarios at the end of a test run."""

import pytest

from tests.chaos.report import Outcome, as_text

OUTCOMES = pytest.StashKey[list[Outcome]]()


@pytest.fixture(scope="session")
def outcomes(pytestconfig: pytest.Config) -> list[Outcome]:
    """Of each scenario, for the report at the end."""
    return pytestconfig.stash.setdefault(OUTCOMES, [])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if found := config.stash.get(OUTCOMES, []):
        terminalreporter.section("chaos")
        terminalreporter.write_line(as_text(found))
