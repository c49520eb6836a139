"""Pre-commit runs the checks of `make lint types`, without a download."""

from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]


def recipe(target: str) -> list[str]:
    """The commands of a target in the Makefile."""
    _, _, rest = (ROOT / "Makefile").read_text().partition(f"\n{target}:")
    lines = rest.partition("\n\n")[0].splitlines()[1:]
    return [line.strip().replace("$(BIN)", ".venv/bin") for line in lines]


def test_pre_commit_runs_the_commands_of_make_lint_and_make_types() -> None:
    repositories = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert [repository["repo"] for repository in repositories] == ["local"]
    entries = [hook["entry"] for repository in repositories for hook in repository["hooks"]]
    assert entries == [*recipe("lint"), *recipe("types")]
