"""No log line above level debug may contain the name of a tenant, as far as the code shows.

Errors count too, because their lines get into logs; those of the commands are answers to the person who asked."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("kvatlas", "publishers", "indexer", "router_client", "router", "simulator")
LOGS = {"info", "warning", "error", "exception", "critical", "report"}
TELLS_TENANTS = """
log.warning("worker %s: refused for %s", worker_id, endpoint.tenant_id)
self._log.report("scope", f"blocks of {message.scope} not applied")
raise InvalidValue(f"may not speak for {tenant!r}")
"""
HARMLESS = """
log.debug("tenant %s", tenant_id)
log.warning("%s", scope.log_name)
raise InvalidValue("tenant_id is missing")
"""


def named(part: ast.expr) -> Iterator[str]:
    """The names of the values that an argument puts into a line: the last name of each."""
    match part:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            yield name
        case ast.JoinedStr() | ast.BinOp() | ast.BoolOp() | ast.IfExp() | ast.Tuple():
            for child in ast.iter_child_nodes(part):
                if isinstance(child, ast.expr):
                    yield from named(child)
        case ast.FormattedValue(value=value):
            yield from named(value)
        case ast.Call(args=arguments):
            for argument in arguments:
                yield from named(argument)


def told(code: str) -> list[int]:
    """Lines of a log call or an error that name a tenant, or a whole scope."""
    found = []
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            call, arguments = node.exc, node.exc.args[:1]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in LOGS:
            call, arguments = node, node.args
        else:
            continue
        names = [name for argument in arguments for name in named(argument)]
        found += [call.lineno] * any("tenant" in name or name == "scope" for name in names)
    return sorted(found)


def test_a_line_that_names_a_tenant_is_found() -> None:
    assert told(TELLS_TENANTS) == [2, 3, 4]
    assert told(HARMLESS) == []


def test_no_line_above_debug_names_a_tenant() -> None:
    files = [file for package in PACKAGES for file in sorted((ROOT / package).rglob("*.py"))]
    assert len(files) > 100
    assert [f"{file.relative_to(ROOT)}:{line}" for file in files for line in told(file.read_text())] == []
