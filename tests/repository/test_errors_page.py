"""docs/errors.md lists every error that the server can send, and every exit code of the command."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from quire.api.http.errors import HEAD_TOO_LARGE, SHAPES
from quire.api.openapi.error_words import ADVICE, error_rows
from quire.api.server import EXIT_DONE, EXIT_FAILED
from quire.cli.exit_codes import EXIT_CODES, FAILED, SUCCESS
from tests.repository.source_files import ROOT, code_files, name_of, tree_of

ERRORS = "quire/api/http/errors.py"
# Malformed HTTP and too large heads are refused before there is a request.
REFUSAL = "quire/api/http/refusal.py"
CONNECTION = "quire/api/http/connection.py"


def _page() -> str:
    return (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")


def _calls(name: str) -> Iterator[str]:
    """Yield the files of the API that call a class, once for each call."""
    for file in code_files("quire/api"):
        if file.suffix == ".py":
            for node in ast.walk(tree_of(file)):
                if isinstance(node, ast.Call) and getattr(node.func, "id", "") == name:
                    yield name_of(file)


def test_statuses_and_codes_have_one_source() -> None:
    assert set(_calls("ErrorShape")) == {ERRORS}
    assert set(_calls("ErrorReport")) == {ERRORS, REFUSAL}
    written = "".join((ROOT / one).read_text(encoding="utf-8") for one in (REFUSAL, CONNECTION))
    assert set(re.findall(r"code=([\w.]+)", written)) == {"None", "HEAD_TOO_LARGE.code", "code"}


def test_every_error_is_on_the_page() -> None:
    assert ADVICE.keys() == SHAPES.keys()
    sent = {(shape.status, shape.code) for shape in (*SHAPES.values(), HEAD_TOO_LARGE)}
    assert {(row.status, row.code) for row in error_rows()} == sent
    rows = re.findall(r"^\| (\d{3}) \| (?:none|`(\w+)`) \|", _page(), re.M)
    assert {(int(status), code or None) for status, code in rows} == sent


def test_every_error_of_the_router_is_on_the_page() -> None:
    found = set()
    for file in (ROOT / "quire" / "router").glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Refusal":
                found.add(tuple(ast.literal_eval(one) for one in node.args[:2]))
    shared = {"invalid_value", "model_not_found", "unknown_url", "method_not_allowed"}
    shared |= {"body_too_large", "headers_too_large", "overloaded", "shutting_down"}
    shared |= {"deadline_missed", "context_length_exceeded", "poison_request"}
    rows = re.findall(r"^\| `(\w+)` \| (\d{3}) \|", _page(), re.M)
    own = {(int(status), code) for code, status in rows}
    assert own == {error for error in found if error[1] not in shared}
    assert {code for _, code in found} >= shared
    assert all(f"`{code}`" in _page() for code in shared)


def test_every_exit_code_is_on_the_page() -> None:
    rows = re.findall(r"^\| (\d+) \| ", _page().partition('id="exit-codes"')[2], re.M)
    assert list(map(int, rows)) == list(EXIT_CODES)
    assert (EXIT_DONE, EXIT_FAILED) == (SUCCESS, FAILED)


def test_subcommands_return_exit_codes_of_the_table() -> None:
    found = {}
    for file in code_files("quire/cli"):
        for node in ast.walk(tree_of(file)):
            if isinstance(node, ast.FunctionDef) and node.name in ("run", "main"):
                returned = {
                    constant.value
                    for statement in ast.walk(node)
                    if isinstance(statement, ast.Return) and statement.value is not None
                    for constant in ast.walk(statement.value)
                    if isinstance(constant, ast.Constant) and type(constant.value) is int
                }
                found[name_of(file)] = returned - EXIT_CODES.keys()
    assert len(found) > 10
    assert not {name: codes for name, codes in found.items() if codes}
