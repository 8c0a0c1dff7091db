"""The documentation site has every page once, and renders it as the repository view does."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

from markdown_it import MarkdownIt

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


def test_code_blocks_are_fenced() -> None:
    """Require fences: the tests of commands and flags read no indented code."""
    indented = [
        f"{page.name}: {token.content[:60]}"
        for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
        for token in MarkdownIt().parse(page.read_text(encoding="utf-8"))
        if token.type == "code_block"
    ]
    assert not indented


def _check() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check", ROOT / "scripts" / "site" / "check.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_check_of_the_site_finds_what_other_hosts_serve(tmp_path: Path) -> None:
    host = "//cdn.example"
    (tmp_path / "index.html").write_text(
        f'<script src="https:{host}/a.js"></script><link rel="stylesheet" href="{host}/b.css">'
        f'<p style="background: url({host}/c.png)"><a href="https:{host}/">link</a>'
        '<img src="own.png"></p>'
    )
    (tmp_path / "own.css").write_text(f'@import "{host}/d.css"; a {{ src: url(own.woff) }}')
    found = [line for line in _check().problems(tmp_path) if "loads" in line]
    names = [line.rpartition("/")[2] for line in found]
    assert names == ["d.css", "a.js", "b.css", "c.png"]


def test_the_check_of_the_site_finds_a_list_that_became_a_paragraph(tmp_path: Path) -> None:
    source = ROOT / "docs" / "security.md"
    built = tmp_path / "index.html"
    built.write_text("<article><h1>Security: known attacks</h1><p>* no list</p></article>")
    found = list(_check()._differences(source, built))
    assert any("<table> in the site" in line for line in found)
