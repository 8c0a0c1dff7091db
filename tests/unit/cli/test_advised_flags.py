"""A flag that an error of a model's start advises is a flag of the commands that print it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from pathlib import Path

import quire
from quire.cli.main import command_parser
from tests.cases import each_case

# Globs of files with errors of an engine's start.
_MEMORY = ("config/memory.py", "config/process_limits.py")
_MODEL = ("models/p*.py", "engine/assembly/p*.py")
_ALL = ("models/**/*.py", "engine/assembly/*.py", "execute/**/*.py", "program/*.py", "runner/*.py")
_START = (*_MEMORY, *_ALL)
_OF_OTHERS = re.compile("--(kv-store|kv-transfer|memory$)")  # of quire serve, and of docker


@each_case(
    ("command", "globs"),
    [
        ("complete", _START),
        ("bench latency", _START),
        ("bench throughput", _START),
        ("profile", _START),
        ("replay", _START),
        ("chat", (*_MEMORY, *_MODEL)),
        ("plan", (*_MEMORY, "engine/assembly/pr*.py")),
    ],
)
def test_a_command_has_the_flags_that_its_errors_advise(command: str, globs: Iterable[str]) -> None:
    name, *further = command.split()
    words = [name, *further, *(["recording"] if name == "replay" else [])]
    parser = command_parser([name]).parse_known_args(words)[0].parser
    root = Path(quire.__file__).parent
    advised = {flag for glob in globs for path in root.glob(glob) for flag in _flags_in(path)}
    assert len(advised) > 5
    lacking = advised - set(parser._option_string_actions)
    assert not {flag for flag in lacking if not _OF_OTHERS.match(flag)}


def _flags_in(path: Path) -> set[str]:
    """Return the flags in the strings of a module, other than docstrings."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    texts = (
        node.value
        for node in nodes
        if isinstance(node, ast.Constant) and id(node) not in docstrings
    )
    return {
        flag
        for text in texts
        if isinstance(text, str)
        for flag in re.findall(r"(?<![\w-])--[a-z][a-z-]+", text)
    }
