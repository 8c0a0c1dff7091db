"""Sizes: of files, functions and constructors, limited; the longest are printed."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path

from tests.conftest import SHOWN
from tests.repository.source_files import code_files, name_of, nodes_of

MAX_FILE_LINES = 700
NUM_SHOWN = 12
MAX_FUNCTION_LINES = 80  # outside kernels
MAX_ARGUMENTS = 8  # of constructors in the packages that decide
KERNELS = "quire/execute/gpu/kernels/"
DECIDING = ("quire/scheduler/", "quire/cache/", "quire/speculative/")


def _num_lines(file: Path) -> int:
    return len(file.read_text(encoding="utf-8").splitlines())


def _functions(file: Path) -> list[tuple[int, str]]:
    return [
        ((node.end_lineno or node.lineno) - node.lineno + 1, f"{name_of(file)}:{node.name}")
        for node in nodes_of(file)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]


def _table(title: str, sizes: list[tuple[int, str]]) -> list[str]:
    largest = sorted(sizes, reverse=True)[:NUM_SHOWN]
    return [title, *(f"{num_lines:6d}  {name}" for num_lines, name in largest)]


def test_no_file_exceeds_the_length_limit(
    record_property: Callable[[str, object], None],
) -> None:
    files = [(_num_lines(file), name_of(file)) for file in code_files()]
    functions = [
        found
        for file in code_files("quire", "bench", "models")
        if file.suffix == ".py"
        for found in _functions(file)
    ]
    lines = _table("longest files", files) + _table("longest functions", functions)
    record_property(SHOWN, "\n".join(lines))
    too_long = [entry for entry in files if entry[0] > MAX_FILE_LINES]
    assert not too_long, "split these by responsibility"


def test_no_function_outside_kernels_exceeds_the_length_limit() -> None:
    found = [
        entry
        for file in code_files("quire")
        if file.suffix == ".py" and not name_of(file).startswith(KERNELS)
        for entry in _functions(file)
        if entry[0] > MAX_FUNCTION_LINES
    ]
    assert not found, "split these into steps with names"


def test_no_constructor_of_a_deciding_package_has_more_arguments_than_allowed() -> None:
    found = [
        (name_of(file), node.lineno)
        for file in code_files("quire")
        if file.suffix == ".py" and name_of(file).startswith(DECIDING)
        for node in nodes_of(file)
        if isinstance(node, ast.FunctionDef) and node.name == "__init__"
        if len(node.args.args) - 1 + len(node.args.kwonlyargs) > MAX_ARGUMENTS
    ]
    assert not found, "group what belongs together"
