"""Classes of attack that are impossible, because the code contains no path for them.

No pickles, no `eval`, no `exec`; and no package that handles requests opens outgoing connections.
See docs/security.md.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

from tests.repository.source_files import code_files, name_of, nodes_of

CODE_FROM_BYTES = frozenset({"pickle", "cPickle", "dill", "marshal", "shelve", "cloudpickle"})
CONNECTIONS = frozenset({"urllib.request", "http.client", "requests", "httpx", "aiohttp", "ftplib"})
# These connect to a server as clients, because their user asked for that.
CLIENTS = ("quire/cli/", "quire/bench/", "quire/doctor/")
SOURCES = [file for file in code_files("quire") if file.suffix == ".py"]


def _imported(nodes: Iterable[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{name.name}" for name in node.names)


def _called(nodes: Iterable[ast.AST]) -> set[str]:
    return {
        node.func.id
        for node in nodes
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }


def test_no_bytes_or_text_run_as_code() -> None:
    found = [
        name_of(file)
        for file in SOURCES
        for nodes in (nodes_of(file),)
        if CODE_FROM_BYTES & set(_imported(nodes)) or {"eval", "exec"} & _called(nodes)
    ]
    assert not found


def test_the_check_finds_injected_code() -> None:
    assert _called(ast.walk(ast.parse("eval('1')"))) == {"eval"}
    assert CODE_FROM_BYTES & set(_imported(ast.walk(ast.parse("from pickle import loads"))))


def test_only_the_package_for_it_imports_the_hub_s_client() -> None:
    found = {
        name_of(file).rpartition("/")[0]
        for file in SOURCES
        if any(name.startswith("huggingface_hub") for name in _imported(nodes_of(file)))
    }
    assert found == {"quire/hub"}


def test_no_package_that_handles_requests_opens_connections() -> None:
    found = [
        name_of(file)
        for file in SOURCES
        if not name_of(file).startswith(CLIENTS) and CONNECTIONS & set(_imported(nodes_of(file)))
    ]
    assert not found
