"""Classes and files named in documentation pages and docstrings exist in this repository."""

from __future__ import annotations

import ast
import builtins
import re
from functools import cache
from pathlib import Path

from tests.repository.source_files import ROOT, code_files, name_of, nodes_of, text_files

# Pages about the past, which may name removed files.
HISTORY = frozenset({"CHANGELOG.md", "EXPERIMENTS.md"})
HTTP_HEADERS = frozenset({"Forwarded", "Host", "Origin", "Via"})
RPC_METHODS = frozenset(
    {"Generate", "Check", "Watch", "ServerLive", "ServerReady", "ServerMetadata"}
    | {"ModelReady", "ModelMetadata", "ModelInfer"}
)
# Files of other projects that docstrings cite.
FOREIGN_FILES = frozenset(
    {"convert_hf_to_gguf.py", "convert_hf_to_gguf_update.py", "encoder.py", "tokenization_qwen.py"}
)
_CLASS = re.compile(r"`([A-Z][a-z0-9]+(?:[A-Z][A-Za-z0-9]*)*)(?:\.\w+)*`")
_PATH = re.compile(r"`((?:\w+/)+\w+\.(?:py|cc|h|md|json|css))`")
_FILE = re.compile(r"(?<![\w/*.-])([a-z]\w*\.py)\b")


@cache
def _known_names() -> frozenset[str]:
    names = set(dir(builtins)) | HTTP_HEADERS | RPC_METHODS
    for file in code_files():
        if file.suffix != ".py":
            names |= set(re.findall(r"\w+", file.read_text(encoding="utf-8")))
            continue
        for node in nodes_of(file):
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                names.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
            elif isinstance(node, ast.alias):
                names.add(node.asname or node.name)
    return frozenset(names)


@cache
def _suffixes() -> frozenset[str]:
    """Yield every suffix of a file's path."""
    kept = [file.relative_to(ROOT) for file in (*text_files(), *ROOT.glob("*/**/*.json"))]
    kept += [file.relative_to(ROOT) for file in ROOT.glob("quire/**/*.css")]
    return frozenset("/".join(file.parts[at:]) for file in kept for at in range(len(file.parts)))


def _unknown_in(text: str) -> set[str]:
    """Return the classes and paths in backticks that do not exist."""
    classes = set(_CLASS.findall(text)) - _known_names()
    paths = {path for path in _PATH.findall(text) if "NAME" not in path}
    return classes | (paths - _suffixes())


def _pages() -> list[Path]:
    return [file for file in text_files() if file.suffix == ".md" and file.name not in HISTORY]


def test_the_check_finds_unknown_names() -> None:
    text = "`NoSuchQueue.get` in `quire/no_such_file.py`, `Scheduler` in `scheduler/scheduler.py`"
    assert _unknown_in(text) == {"NoSuchQueue", "quire/no_such_file.py"}


def test_classes_and_files_named_by_pages_exist() -> None:
    found = {name_of(page): _unknown_in(page.read_text(encoding="utf-8")) for page in _pages()}
    assert not {page: names for page, names in found.items() if names}


def test_files_named_by_docstrings_exist() -> None:
    found = {}
    for file in code_files("quire"):
        if file.suffix != ".py":
            continue
        documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        nodes = [node for node in nodes_of(file) if isinstance(node, documented)]
        text = "\n".join(ast.get_docstring(node) or "" for node in nodes)
        unknown = set(_FILE.findall(text)) - FOREIGN_FILES - _suffixes()
        if unknown:
            found[name_of(file)] = unknown
    assert not found
