"""Classes of attack that cannot exist here, because the code has no way to them (docs/security.md).

No pickles, no `eval`, no `exec`; and no room that a request reaches opens connections to others.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.repository.source_files import code_files, name_of

CODE_FROM_BYTES = frozenset({"pickle", "cPickle", "dill", "marshal", "shelve", "cloudpickle"})
CONNECTIONS = frozenset({"urllib.request", "http.client", "requests", "httpx", "aiohttp", "ftplib"})
# Speak to a server as a client, because their user asked for that.
CLIENTS = ("quire/cli/", "quire/bench/")
SOURCES = [file for file in code_files("quire") if file.suffix == ".py"]


def _imported(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{name.name}" for name in node.names)


@pytest.mark.parametrize("file", SOURCES, ids=name_of)
def test_nothing_that_runs_bytes_or_texts_as_code(file: Path) -> None:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    assert not CODE_FROM_BYTES & set(_imported(tree))
    called = {
        node.func.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    assert not {"eval", "exec"} & called


def test_no_room_a_request_reaches_connects_to_others() -> None:
    found = [
        name_of(file)
        for file in SOURCES
        if not name_of(file).startswith(CLIENTS)
        and CONNECTIONS & set(_imported(ast.parse(file.read_text(encoding="utf-8"))))
    ]
    assert not found
