"""Everything that the documents refer to exists: links and their anchors, files, modules, tests, scenarios, commands with
their flags.

In documents, this checks everything in backticks that looks like a path, a dotted name of ours, a test or a flag, and every
`make` and `kvatlas` command; in code, every mention of a document. Nothing is fetched.
"""

import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from kvatlas.telemetry import INSTRUMENTS
from tests.chaos.runner import ALL_SCENARIOS
from tests.kvatlas_cli.command_line import commands

ROOT = Path(__file__).parents[2]
CODE_SUFFIXES = {".py", ".lua", ".toml", ".yaml", ".yml", ".conf", ".txt", ""}
PACKAGES = (
    "kvatlas_publishers", "kvatlas_indexer", "kvatlas_router", "kvatlas_simulator", "kvatlas_cli", "kvatlas",
    "publishers", "indexer", "router_client", "router", "simulator", "benchmarks", "tests",
)  # fmt: skip

LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^( *)```.*?^\1```", re.MULTILINE | re.DOTALL)
INDENTED = re.compile(r"^ {4}.*$", re.MULTILINE)
TICKED = re.compile(r"`([^`\n]+)`")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
FILE = re.compile(r"(?:[\w.-]+/)*[\w-]+\.(?:py|lua|md|conf|toml|yaml|yml|gz)|(?:[\w.-]+/)+")
FOLDER = re.compile(rf"(?:{'|'.join((*PACKAGES, 'compose', 'docs', 'examples', 'k8s'))})/[\w./-]+")
LABELS = {"kvatlas/engine"}
"""Labels of objects in Kubernetes, not files."""
DOTTED = re.compile(rf"\b(?:{'|'.join(name for name in PACKAGES if name != 'router')})(?:\.\w+)+")
LISTED = re.compile(r"(?m)^ +([\w/]+(?:\.(?:py|lua)|/))  ")
TEST_FUNCTION = re.compile(r"test_\w+")
MENTION = re.compile(r"docs/[\w-]+\.(?:md|conf)(?:#[\w-]+)?")
MAKE = re.compile(r"\bmake ([a-z][\w-]*)")
COMMAND = re.compile(r"(?<!--namespace )\bkvatlas ([a-z][a-z-]*)\b([^\n|`]*)")
FLAG = re.compile(r"(?<!\S)--[a-z][a-z-]*")
FOREIGN_FLAGS = {
    "--binary", "--decode-context-parallel-size", "--disaggregation-mode", "--enable-cache-report", "--enable-feature",
    "--enable-metrics", "--enable-prompt-tokens-details", "--enable-scale-out", "--help", "--hypothesis-seed",
    "--kv-cache-memory-bytes", "--kv-event-log-size", "--kv-events-config", "--kv-indexer-endpoint", "--kv-indexer-url",
    "--ours", "--prefill-context-parallel-size", "--reasoning-effort-map", "--scheduling-policy", "--wheel-dir",
}  # fmt: skip
"""Flags of engines, tools, benchmarks, and of every command; any other flag in backticks belongs to a command of kvatlas."""


def project_files() -> Iterator[Path]:
    for top in sorted(ROOT.iterdir()):
        if top.is_symlink() or top.name in {"build", "dist"} or (top.name.startswith(".") and top.name != ".ci"):
            continue
        for path in [top] if top.is_file() else sorted(top.rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                yield path


FILES = list(project_files())
NAMES = Counter(path.name for path in FILES)
DOCUMENTS = [path for path in FILES if path.suffix == ".md" and path.name != "CHANGELOG.md"]
"""Without the changelog, which may name things that are gone."""
each_document = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))


@cache
def text_of(path: Path) -> str:
    return path.read_text()


@cache
def prose_of(path: Path) -> str:
    """The text without its code blocks."""
    return FENCE.sub("", text_of(path))


@cache
def anchors_of(path: Path) -> frozenset[str]:
    """The anchors of the headings: lower case, spaces as hyphens, without other punctuation; a repeated one gets a number."""
    seen: Counter[str] = Counter()
    found = set()
    for heading in HEADING.findall(prose_of(path)):
        text = LINK.sub(lambda link: link[0][1 : link[0].index("]")], heading).lower()
        slug = re.sub(r"[^\w\- ]", "", text).strip().replace(" ", "-")
        found.add(f"{slug}-{seen[slug]}" if seen[slug] else slug)
        seen[slug] += 1
    return frozenset(found)


def has_target(base: Path, target: str) -> bool:
    """True if a link or a mention leads to a file and, if it names one, to a heading in it."""
    name, _, anchor = target.partition("#")
    path = (base / name).resolve()
    return path.exists() and (not anchor or anchor in anchors_of(path))


def ticked(document: Path) -> list[str]:
    return TICKED.findall(prose_of(document))


@each_document
def test_every_relative_link_leads_to_a_file_and_a_heading(document: Path) -> None:
    wrong = [
        target
        for target in LINK.findall(prose_of(document))
        if not target.startswith(("http://", "https://"))
        and not has_target(document if target.startswith("#") else document.parent, target)
    ]
    assert not wrong


@each_document
def test_every_path_in_backticks_exists(document: Path) -> None:
    """Relative to the project's root or to the document; a bare file name has to be the name of some file."""
    wrong = [
        name
        for name in ticked(document)
        if (FILE.fullmatch(name) or FOLDER.fullmatch(name))
        and name not in LABELS
        and not (ROOT / name).exists()
        and not (document.parent / name).exists()
        and not NAMES[name]
    ]
    assert not wrong


@each_document
def test_every_dotted_name_is_a_module_an_attribute_or_a_metric(document: Path) -> None:
    metrics = {series.instrument.name for group in INSTRUMENTS.values() for series in group.values()}
    wrong = [
        name
        for command in ticked(document)
        for name in DOTTED.findall(command)
        if not any(metric == name or metric.startswith(f"{name}.") for metric in metrics) and not is_in_code(name)
    ]
    assert not wrong


def is_in_code(name: str) -> bool:
    """True for a module, a name that its module defines, or a text in the code (a subject, a span's attribute)."""
    *package, last = name.split(".")
    folder = ROOT.joinpath(*package)
    if (folder / last).is_dir() or (folder / f"{last}.py").is_file():
        return True
    for file in (folder.with_suffix(".py"), folder / "__init__.py"):
        if file.is_file() and re.search(rf"\b{last}\b", text_of(file)):
            return True
    return any(f'"{name}' in text_of(path) for path in FILES if path.suffix == ".py")


@each_document
def test_every_test_in_backticks_exists(document: Path) -> None:
    code = "\n".join(text_of(path) for path in FILES if path.name.startswith("test_") and path.suffix == ".py")
    wrong = [name for name in ticked(document) if TEST_FUNCTION.fullmatch(name) and f"def {name}(" not in code]
    assert not wrong


def test_every_scenario_in_the_tables_of_reliability_exists() -> None:
    tested = [row.split("|")[-2] for row in text_of(ROOT / "docs/reliability.md").splitlines() if row.startswith("|")]
    named = {name for cell in tested for name in TICKED.findall(cell) if re.fullmatch(r"[a-z_]+", name)}
    assert named - set(ALL_SCENARIOS) == set()
    assert set(ALL_SCENARIOS) - named == set(), "scenarios without a row"


@each_document
def test_every_make_target_exists(document: Path) -> None:
    targets = set(re.findall(r"^([.a-z-]+):", text_of(ROOT / "Makefile"), re.MULTILINE))
    spans = [
        *ticked(document),
        *INDENTED.findall(text_of(document)),
        *(m[0] for m in FENCE.finditer(text_of(document))),
    ]
    assert {target for span in spans for target in MAKE.findall(span)} <= targets


@cache
def flags_by_command() -> dict[str, set[str]]:
    return {
        name: {
            flag
            for each in (command, *getattr(command, "commands", {}).values())  # `auth` has subcommands
            for one in each.params
            for flag in (*one.opts, *one.secondary_opts)
        }
        for name, command in commands().items()
    }


@each_document
def test_every_command_and_flag_exists(document: Path) -> None:
    known = flags_by_command()
    spans = [*ticked(document), *INDENTED.findall(text_of(document))]
    spans += [m[0].replace("\\\n", " ") for m in FENCE.finditer(text_of(document))]
    wrong = [
        f"kvatlas {command} {flag}".rstrip()
        for span in spans
        for command, rest in COMMAND.findall(span)
        if "import" not in span
        for flag in FLAG.findall(rest) or [""]
        if command not in known or (flag and flag not in known[command] | {"--help"})
    ]
    everything = set().union(*known.values()) | FOREIGN_FLAGS
    alone = [span for span in ticked(document) if span.startswith("--")]
    wrong += [flag for span in alone for flag in FLAG.findall(span) if flag not in everything]
    assert not wrong


def test_every_document_that_code_mentions_exists() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}: {mention}"
        for path in FILES
        if path.suffix in CODE_SUFFIXES
        for mention in MENTION.findall(text_of(path))
        if not has_target(ROOT, mention)
    ]
    assert not wrong


def test_files_that_a_package_lists_in_its_docstring_exist() -> None:
    missing = []
    for package in (path for path in FILES if path.name == "__init__.py"):
        for name in LISTED.findall(package.read_text()):
            found = package.parent / name
            if not (found.is_dir() if name.endswith("/") else found.is_file()):
                missing.append(f"{package.relative_to(ROOT)}: {name}")
    assert not missing
