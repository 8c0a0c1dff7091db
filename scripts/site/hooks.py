"""Build the site from the repository's own pages (hooks of MkDocs, named in mkdocs.yml).

Pages keep the links of the repository view. While building, top-level pages such as README.md join
those of docs/, a link to a file of the repository becomes a link inside the site, and a link to
anything that the site does not have becomes plain text.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
TOP_PAGES = ("README.md", "ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md", "EXPERIMENTS.md")
ICON = "quire/api/web/icon.svg"
# Searches find reference tables first, and the code's own pages last.
_BOOST = {"flags.md": 4.0, "request-fields.md": 2.0, "errors.md": 2.0, "metrics.md": 2.0}
_INTERNALS = ("packages/", "EXPERIMENTS", "CHANGELOG", "gpu-kernels", "glossary", "reading")
_IMAGES = (".png", ".svg")
_CODE = re.compile(r"^( *)(`{3,}|~{3,}).*?^\1\2|`+[^`]*`+", re.M | re.S)
_CELL = re.compile(r"<t[dh]\b.*?</t[dh]>", re.S)
_WORD = re.compile(r"<code>([^<\s]{1,32})</code>")
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Make the anchors of headings those of the repository view."""
    config.mdx_configs.setdefault("toc", {})["slugify"] = slug
    return config


def slug(heading: str, separator: str) -> str:
    """Return the anchor of a heading as repository hosts make it."""
    kept = re.sub(r"[^\w -]", "", heading.lower()).strip()
    return kept.replace(" ", separator)


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the top-level pages, and images outside docs/ that pages show."""
    for name in TOP_PAGES:
        files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    files.append(File.generated(config, "web/icon.svg", abs_src_path=str(ROOT / ICON)))
    for path in sorted({path for file in files for path in _images_of(file)}):
        files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Return a page with the links of the site."""
    here = page.file.src_uri
    boost = 0.5 if here.startswith(_INTERNALS) else _BOOST.get(here, 1.0)
    page.meta["search"] = {"boost": boost}

    def link(match: re.Match[str]) -> str:
        bang, text, target = match.groups()
        path, hash_sign, anchor = target.partition("#")
        if not path or re.match(r"[a-z]+:", path):
            return match[0]
        kept = source_of(_in_repository(here, path))
        if files.get_file_from_path(kept) is None:
            if not (ROOT / _in_repository(here, path)).exists():
                return match[0]  # MkDocs reports it
            return text
        relative = posixpath.relpath(kept, posixpath.dirname(here) or ".")
        return f"{bang}[{text}]({relative}{hash_sign}{anchor})"

    return outside_code(markdown, lambda text: _LINK.sub(link, text))


def on_page_content(html: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Write pipes in cells as the repository view does, and mark short code to stay in one line."""
    html = _CELL.sub(lambda cell: cell[0].replace(r"\|", "|"), html)
    return _WORD.sub(r'<code class="word">\1</code>', html)


def outside_code(markdown: str, change: Callable[[str], str]) -> str:
    """Return Markdown with its text changed, and its code as it was."""
    codes: list[str] = []

    def hide(match: re.Match[str]) -> str:
        codes.append(match[0])
        return f"\0{len(codes) - 1}\0"

    changed = change(_CODE.sub(hide, markdown))
    return re.sub(r"\0(\d+)\0", lambda match: codes[int(match[1])], changed)


def source_of(path: str) -> str:
    """Return the name in the site of a file of the repository."""
    return path.removeprefix("docs/")


def _in_repository(here: str, path: str) -> str:
    """Return the path in the repository of a link's target on the page `here` of the site."""
    folder = "" if here in TOP_PAGES else posixpath.join("docs", posixpath.dirname(here))
    return posixpath.normpath(posixpath.join(folder, path))


def _images_of(file: File) -> Iterator[str]:
    """Yield the images outside docs/ that a page shows or links to."""
    if not file.is_documentation_page():
        return
    for _, _, target in _LINK.findall(file.content_string):
        path = _in_repository(file.src_uri, target)
        if path.endswith(_IMAGES) and not path.startswith("docs/") and (ROOT / path).is_file():
            yield path
