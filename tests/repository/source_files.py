"""Which files the repository tests check: the kept sources, without built files.

They are found by walking the source directories, so that a copy without git is checked as well.
"""

from __future__ import annotations

import ast
import os
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
_FOLDERS = (
    *("quire", "native", "bench", "tests", "models", "docs", "examples", "scripts", "deploy"),
    ".ci",
)
_CODE = (".py", ".cc", ".h")
_TEXT = (
    *(*_CODE, ".md", ".toml", ".txt", ".sh", ".cfg", ".ini", ".yml", ".yaml", ".cmake", ""),
    *(".conf", ".service"),
)
_NOT_OURS = ("__pycache__", "checkpoints", "results", "recorded", "box", "box_draft", "box_eagle")


def code_files(*folders: str) -> list[Path]:
    """Return Python and C++ sources, in all directories or in the given ones."""
    return [
        file for folder in folders or _FOLDERS for file in _kept(folder) if file.suffix in _CODE
    ]


def text_files() -> list[Path]:
    """Return all kept text files, those of the top directory included."""
    top = [file for file in sorted(ROOT.iterdir()) if file.is_file() and file.name != "LICENSE"]
    found = [*top, *(file for folder in _FOLDERS for file in _kept(folder))]
    return [file for file in found if file.suffix in _TEXT and not file.name.startswith(".git")]


@cache
def tree_of(file: Path) -> ast.Module:
    """Return the syntax tree of a Python file; each is parsed once for all tests."""
    return ast.parse(file.read_text(encoding="utf-8"))


@cache
def nodes_of(file: Path) -> tuple[ast.AST, ...]:
    """Return all nodes of the syntax tree of a Python file."""
    return tuple(ast.walk(tree_of(file)))


def name_of(file: Path) -> str:
    """Return the path relative to the root."""
    return file.relative_to(ROOT).as_posix()


@cache
def _kept(folder: str) -> tuple[Path, ...]:
    """Return the kept files of a folder, sorted."""
    found = []
    for at, folders, names in os.walk(ROOT / folder):
        folders[:] = [name for name in folders if name not in _NOT_OURS]
        found += [Path(at, name) for name in names]
    return tuple(sorted(found))
