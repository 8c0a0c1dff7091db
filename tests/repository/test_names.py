"""Names: meaningless words are not used for files, classes, functions or variables."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.repository.source_files import code_files, name_of, nodes_of

EMPTY_WORDS = frozenset(
    {"helper", "helpers", "util", "utils", "utility", "utilities", "common", "misc", "mixin"}
    | {"handler", "handlers", "info"}
)
VAGUE_ALONE = "data"
DATA_FILES = frozenset({"tests/data.py", "bench/data.py"})
_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_CPP_NOISE = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|#include[^\n]*|\bstd::\w+', re.S)


def _words(name: str) -> set[str]:
    return {word.lower() for word in _WORDS.findall(name)}


def _is_empty(name: str, *, may_be_vague: bool = False) -> bool:
    is_vague = name.strip("_").lower() == VAGUE_ALONE and not may_be_vague
    return is_vague or bool(_words(name) & EMPTY_WORDS)


def _python_names(file: Path) -> Iterator[tuple[str, int]]:
    """Yield names defined in the file, not those of libraries that it uses."""
    for node in nodes_of(file):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if not node.name.startswith("test_"):  # a sentence, not a name
                yield node.name, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if isinstance(node.value, ast.Name) and node.value.id == "self":
                yield node.attr, node.lineno
        elif isinstance(node, ast.alias) and node.asname:
            yield node.asname, node.asname.count("\n")


def _cpp_names(file: Path) -> Iterator[tuple[str, int]]:
    plain = _CPP_NOISE.sub(
        lambda match: "\n" * match[0].count("\n"), file.read_text(encoding="utf-8")
    )
    for number, line in enumerate(plain.splitlines(), start=1):
        for name in re.findall(r"(?<![.>\w])[A-Za-z_]\w*(?!\w*\()", line):
            yield name, number


def test_the_check_finds_injected_names() -> None:
    assert all(map(_is_empty, ["TensorUtils", "my_helper", "IOMixin", "data", "model_info"]))
    assert not any(map(_is_empty, ["commonly", "dataset", "information", "rebase", "handle"]))


def test_no_file_has_a_meaningless_name() -> None:
    named = [file for file in code_files() if name_of(file) not in DATA_FILES]
    found = [name_of(file) for file in named if any(map(_is_empty, [file.stem, file.parent.name]))]
    assert not found


def test_no_class_is_a_mere_base_class() -> None:
    found = [
        f"{name_of(file)}:{node.lineno} {node.name}"
        for file in code_files("quire", "bench", "models")
        if file.suffix == ".py"
        for node in nodes_of(file)
        if isinstance(node, ast.ClassDef) and _words(node.name) & {"base", "mixin", "abstract"}
    ]
    assert not found


@pytest.mark.parametrize("folder", ["quire", "native", "bench", "tests", "models"])
def test_no_identifier_has_a_meaningless_name(folder: str) -> None:
    """`data` alone is C++'s own name for a buffer's first element, and tests draw data."""
    found = []
    for file in code_files(folder):
        is_cpp = file.suffix != ".py"
        names = _cpp_names(file) if is_cpp else _python_names(file)
        found += [
            f"{name_of(file)}:{line} {name}"
            for name, line in names
            if _is_empty(name, may_be_vague=is_cpp or folder == "tests")
        ]
    assert not found, "name its content or purpose"


def test_the_scheduler_and_the_cache_have_no_phases() -> None:
    found = [
        f"{name_of(file)}:{line} {name}"
        for folder in ("quire/scheduler", "quire/cache")
        for file in code_files(folder)
        for name, line in _python_names(file)
        if _words(name) & {"prefill", "decode", "decoding"}
    ]
    assert not found, "a request has tokens not yet computed; there is no other state"
