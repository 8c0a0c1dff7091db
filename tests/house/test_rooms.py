"""A page a room: docs/rooms has one for each, and it names the files that are there, no others."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.house.source_files import ROOT, code_files, name_of

PAGES = ROOT / "docs" / "rooms"
ROOMS = sorted(folder.parent.name for folder in (ROOT / "quire").glob("*/__init__.py"))
MAX_PAGE_LINES = 45
_FIRST_CELL = re.compile(r"^\| (`[^|]*) \|", re.M)
_NAME = re.compile(r"`([\w./*]+\.(?:py|cc|h))`")


def _num_lines(page: Path) -> int:
    return len(page.read_text(encoding="utf-8").splitlines())


def _named(page: Path) -> list[str]:
    """File names in the first column of the page's table."""
    cells = _FIRST_CELL.findall(page.read_text(encoding="utf-8"))
    return [name for cell in cells for name in _NAME.findall(cell)]


def test_every_room_has_a_short_page_and_every_page_is_linked() -> None:
    pages = {page.stem: page for page in PAGES.glob("*.md")}
    assert sorted(pages) == sorted([*ROOMS, "native"])
    long = [name for name, page in pages.items() if _num_lines(page) > MAX_PAGE_LINES]
    assert not long
    for document in ("ARCHITECTURE.md", "docs/reading.md"):
        text = (ROOT / document).read_text(encoding="utf-8")
        assert not [name for name in pages if f"rooms/{name}.md" not in text], document


@pytest.mark.parametrize("room", ROOMS)
def test_the_page_of_a_room_names_its_files(room: str) -> None:
    files = {file.name for file in code_files(f"quire/{room}") if file.name != "__init__.py"}
    assert set(_named(PAGES / f"{room}.md")) == files


def test_the_page_of_native_names_its_files() -> None:
    sources = [file for file in code_files("native") if "bind" not in file.parts]
    named = {Path(name).name for name in _named(PAGES / "native.md") if "*" not in name}
    assert named == {Path(name_of(file)).name for file in sources}
