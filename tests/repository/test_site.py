"""The documentation site has every page once, and renders it as the repository view does."""

from __future__ import annotations

import re

from tests.repository.source_files import ROOT

TOP_PAGES = {"README.md", "ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md", "EXPERIMENTS.md"}


def _listed() -> list[str]:
    """Return the pages that `nav` of mkdocs.yml lists."""
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    return re.findall(r"^ +- .+: (\S+\.md)$", text, re.M)


def test_the_navigation_lists_every_page_once() -> None:
    docs = ROOT / "docs"
    pages = {page.relative_to(docs).as_posix() for page in docs.rglob("*.md")} | TOP_PAGES
    listed = _listed()
    lost = sorted(pages - set(listed))
    assert not lost, f"add a line to nav of mkdocs.yml for {', '.join(lost)}"
    unknown = sorted(set(listed) - pages)
    assert not unknown, f"mkdocs.yml lists pages that do not exist: {', '.join(unknown)}"
    assert len(listed) == len(set(listed))


def test_nested_lists_are_indented_for_every_renderer() -> None:
    """Require four spaces: with two or three the site shows one flat list."""
    flat = []
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        text = re.sub(r"^ *```.*?^ *```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
        flat += [
            f"{page.name}: {line[:60]}"
            for line in re.findall(r"^ {1,3}(?:[*-]|\d+\.) .*", text, re.M)
        ]
    assert not flat
