"""Check docs/packages: one short page per package, and each page lists exactly its files."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from tests.repository.source_files import ROOT, code_files, name_of

PAGES = ROOT / "docs" / "packages"
# Subpackages with a page of their own; their files are not listed on the parent's page.
INNER = {
    "anthropic": "quire/api/anthropic",
    "gpu": "quire/execute/gpu",
    "llama_cpp": "quire/api/llama_cpp",
    "ollama": "quire/api/ollama",
    "responses": "quire/api/openai/responses",
    "rpc": "quire/api/rpc",
}
OUTER = {file.parent.name: f"quire/{file.parent.name}" for file in ROOT.glob("quire/*/__init__.py")}
PACKAGES = dict(sorted((OUTER | INNER).items()))
MAX_PAGE_LINES = 75
_FIRST_CELL = re.compile(r"^\| (`[^|]*) \|", re.M)
_NAME = re.compile(r"`([\w./*]+\.(?:py|cc|h))`")


def _num_lines(page: Path) -> int:
    return len(page.read_text(encoding="utf-8").splitlines())


def _named(page: Path) -> list[str]:
    """Return the files in the first column of the page's table, relative to the package."""
    cells = _FIRST_CELL.findall(page.read_text(encoding="utf-8"))
    return [name for cell in cells for name in _NAME.findall(cell)]


def test_every_package_has_a_short_page_and_every_page_is_linked() -> None:
    pages = {page.stem: page for page in PAGES.glob("*.md")}
    assert sorted(pages) == sorted([*PACKAGES, "native"])
    long = [name for name, page in pages.items() if _num_lines(page) > MAX_PAGE_LINES]
    assert not long
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    assert not [name for name in pages if f"packages/{name}.md" not in text]


def test_pages_say_the_layer_that_the_import_contract_gives() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    layers = contracts["tool"]["importlinter"]["contracts"][0]["layers"]
    given = {
        package.strip().removeprefix("quire."): len(layers) - 1 - at
        for at, layer in enumerate(layers)
        for package in layer.split("|")
    }
    said = {}
    for page in PAGES.glob("*.md"):
        if found := re.search(r"^Layer (\d+)\.", page.read_text(encoding="utf-8"), re.M):
            said[page.stem] = int(found[1])
    assert said == {name: given[name] for name in said}
    assert len(said) >= 20


@pytest.mark.parametrize("package", PACKAGES)
def test_the_page_of_a_package_lists_its_files(package: str) -> None:
    inner = [ROOT / folder for name, folder in INNER.items() if name != package]
    files = {
        file.relative_to(ROOT / PACKAGES[package]).as_posix()
        for file in code_files(PACKAGES[package])
        if file.name != "__init__.py" and not any(file.is_relative_to(folder) for folder in inner)
    }
    assert set(_named(PAGES / f"{package}.md")) == files


def test_the_page_of_native_lists_its_files() -> None:
    sources = [file for file in code_files("native") if "bind" not in file.parts]
    named = {Path(name).name for name in _named(PAGES / "native.md") if "*" not in name}
    assert named == {Path(name_of(file)).name for file in sources}
