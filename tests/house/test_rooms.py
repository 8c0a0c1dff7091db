"""A page a room: docs/rooms has one for each, and it names the files that are there, no others."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.house.source_files import ROOT, code_files, name_of

PAGES = ROOT / "docs" / "rooms"
# Rooms by the names of their pages. The GPU's folder lies in its row's room, and is one itself.
INNER = {"gpu": "quire/execute/gpu"}
OUTER = {file.parent.name: f"quire/{file.parent.name}" for file in ROOT.glob("quire/*/__init__.py")}
ROOMS = dict(sorted((OUTER | INNER).items()))
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
    inner = [ROOT / folder for name, folder in INNER.items() if name != room]
    files = {
        file.name
        for file in code_files(ROOMS[room])
        if file.name != "__init__.py" and not any(file.is_relative_to(folder) for folder in inner)
    }
    assert set(_named(PAGES / f"{room}.md")) == files


def test_the_page_of_native_names_its_files() -> None:
    sources = [file for file in code_files("native") if "bind" not in file.parts]
    named = {Path(name).name for name in _named(PAGES / "native.md") if "*" not in name}
    assert named == {Path(name_of(file)).name for file in sources}
