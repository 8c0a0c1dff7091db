"""Check the built site: it loads nothing from other hosts, and pages keep their structure.

`python scripts/site/check.py build/site` exits 1 with a line for each problem. The structure of a
page (headings, list items, tables, code blocks) is compared with what the repository view shows,
by a renderer of CommonMark: a list that Python-Markdown takes for a paragraph is found so.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

from markdown_it import MarkdownIt

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
_LOADS = {
    **dict.fromkeys(
        ("script", "img", "iframe", "embed", "source", "video", "audio", "input"), "src"
    ),
    "link": "href",
    "object": "data",
}
_STYLE_URL = re.compile(r"(?:url\(|@import)\s*[\"']?((?:https?:)?//[^\"')]+)")
_COUNTED = ("h1", "h2", "h3", "h4", "li", "table", "tr", "td", "code", "pre", "img")


class _Page(HTMLParser):
    """What a page loads, and how often the elements of its article occur."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.counts: Counter[str] = Counter()
        self._in_article = "<article" not in text
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if tag in _LOADS:
            self.loads.append(values.get(_LOADS[tag]) or "")
        self.loads += _STYLE_URL.findall(values.get("style") or "")
        if tag == "article":
            self._in_article = True
        elif self._in_article and tag in _COUNTED:
            self.counts[tag] += 1

    def handle_endtag(self, tag: str) -> None:
        if tag == "article":
            self._in_article = False


def problems(site: Path) -> Iterator[str]:
    """Yield a line for each problem of a built site."""
    if not (site / "index.html").is_file():
        yield f"{site}: no site; build it with mkdocs build --strict"
    for path in sorted(site.rglob("*.css")):
        for url in _STYLE_URL.findall(path.read_text(encoding="utf-8")):
            yield f"{path.relative_to(site)}: loads {url}"
    for path in sorted(site.rglob("*.html")):
        page = _Page(path.read_text(encoding="utf-8"))
        for url in page.loads:
            if re.match(r"(?:[a-z]+:)?//", url):
                yield f"{path.relative_to(site)}: loads {url}"
    for source, built in _pages(site):
        yield from _differences(source, built)


def _pages(site: Path) -> Iterator[tuple[Path, Path]]:
    """Yield each page of the repository with its place in the site."""
    for source in [*ROOT.glob("*.md"), *DOCS.rglob("*.md")]:
        name = source.relative_to(DOCS if source.is_relative_to(DOCS) else ROOT)
        folder = site if name.name == "README.md" else site / name.with_suffix("")
        yield source, folder / "index.html"


def _differences(source: Path, built: Path) -> Iterator[str]:
    if not built.is_file():
        yield f"{source.relative_to(ROOT)}: not in the site"
        return
    rendered = MarkdownIt("commonmark", {"html": True}).enable("table")
    wanted = _Page(rendered.render(source.read_text(encoding="utf-8"))).counts
    found = _Page(built.read_text(encoding="utf-8")).counts
    if r"\|" in built.read_text(encoding="utf-8"):
        yield f"{source.relative_to(ROOT)}: a pipe of a table is shown with its backslash"
    for tag in _COUNTED:
        if wanted[tag] != found[tag]:
            yield (
                f"{source.relative_to(ROOT)}: {found[tag]} <{tag}> in the site, {wanted[tag]} in "
                "the repository view"
            )


def main() -> None:
    found = list(problems(Path(sys.argv[1])))
    print("\n".join(found) or "the site is complete and loads nothing from other hosts")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
