"""The prose lint finds injected faults and accepts plain text."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.repository.source_files import ROOT

SOURCE = '''"""Decide WHO_WORD runs."""

most_rows = 3
text = "the client is TELL_WORD of it"  # a short COMMENT_WORD
name = "WHO_WORD"
'''


@pytest.fixture
def prose_lint(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("prose_lint", ROOT / "scripts" / "prose_lint.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "prose_lint", module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "ROOT", tmp_path)
    return module


def _write(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def _planted() -> str:
    """Return SOURCE with the words that this file itself must not contain."""
    words = {"WHO_WORD": "wh" + "o", "TELL_WORD": "to" + "ld", "COMMENT_WORD": "someb" + "ody"}
    text = SOURCE
    for name, word in words.items():
        text = text.replace(name, word)
    return text


def _found(module: ModuleType, root: Path) -> list[tuple[str, str]]:
    return [
        (finding.rule, finding.place.partition(":")[2])
        for path in module.files()
        for finding in module.findings_of(path)
    ]


def test_each_rule_finds_its_fault(prose_lint: ModuleType, tmp_path: Path) -> None:
    _write(tmp_path, "quire/api/a.py", _planted())
    _write(tmp_path, "docs/a.md", "word " * 30 + "\n\n| " + "cell " * 40 + "|\n")
    assert sorted(_found(prose_lint, tmp_path)) == [
        ("columns", "1"),
        ("identifiers", "3"),
        ("personified", "1"),
        ("personified", "4"),
        ("personified", "4"),
    ]


def test_plain_text_passes(prose_lint: ModuleType, tmp_path: Path) -> None:
    _write(tmp_path, "quire/api/a.py", '"""Return the longest cached prefix."""\n\nmax_rows = 3\n')
    _write(tmp_path, "docs/a.md", "Run `quire serve` to start the server.\n")
    assert _found(prose_lint, tmp_path) == []
    assert prose_lint.lint() == 0


def test_a_fault_is_printed_with_its_place_and_fails(
    prose_lint: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _write(tmp_path, "quire/api/a.py", _planted())
    assert prose_lint.lint() == 1
    assert "quire/api/a.py:3: identifiers: most_rows" in capsys.readouterr().out
