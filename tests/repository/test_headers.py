"""Headers: every source file begins with a description."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.repository.source_files import ROOT, code_files, name_of, tree_of

MIN_LINES = 3


def _header_lines(file: Path) -> int:
    text = file.read_text(encoding="utf-8")
    if file.suffix != ".py":
        return _comment_lines(text)
    first = next(iter(tree_of(file).body), None)
    is_docstring = (
        isinstance(first, ast.Expr)
        and isinstance(first.value, ast.Constant)
        and isinstance(first.value.value, str)
    )
    if not is_docstring or first is None:
        return 0
    return (first.end_lineno or first.lineno) - first.lineno + 1


def _comment_lines(text: str) -> int:
    num_lines, in_block = 0, False
    for line in text.splitlines():
        stripped = line.strip()
        in_block = in_block or stripped.startswith("/*")
        if not in_block and not stripped.startswith("//"):
            break
        num_lines += 1
        in_block = in_block and "*/" not in stripped
    return num_lines


@pytest.mark.parametrize("folder", ["quire", "native", "bench", "models"])
def test_every_source_file_opens_with_a_description(folder: str) -> None:
    files = [file for file in code_files(folder) if file.read_text(encoding="utf-8").strip()]
    short = [name_of(file) for file in files if _header_lines(file) < MIN_LINES]
    assert not short, f"open these with {MIN_LINES} lines or more: the purpose and the invariants"


def test_every_test_file_opens_with_its_subject() -> None:
    assert not [name_of(file) for file in code_files("tests") if _header_lines(file) < 1]


def test_package_files_are_empty_except_the_top_one() -> None:
    top = ROOT / "quire" / "__init__.py"
    packages = [file for file in code_files("quire") if file.name == "__init__.py" and file != top]
    assert packages
    assert not [name_of(file) for file in packages if file.read_text(encoding="utf-8").strip()]
