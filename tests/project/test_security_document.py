"""docs/security.md names tests that exist."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
NAMED = re.compile(r"`(tests/[a-z0-9_/]+\.py)(?:::(test_[a-z0-9_]+))?`")


def test_every_test_that_the_document_names_exists() -> None:
    found = NAMED.findall((ROOT / "docs/security.md").read_text())
    assert len(found) > 20
    for file, test in found:
        tree = ast.parse((ROOT / file).read_text())
        names = {node.name for node in tree.body if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))}
        assert not test or test in names, f"{file} has no {test}"


def test_every_claim_in_a_table_names_a_test() -> None:
    rows = [line for line in (ROOT / "docs/security.md").read_text().splitlines() if line.startswith("| ")]
    claims = [row for row in rows if not row.endswith("| test |")]
    assert claims and not [row for row in claims if not NAMED.search(row)]
