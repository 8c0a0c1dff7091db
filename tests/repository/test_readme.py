"""README and related pages: short, and every link and command in them exists."""

from __future__ import annotations

import re
from pathlib import Path

from quire.cli.completion import subcommand_words
from quire.cli.main import SUBCOMMANDS
from quire.config.groups import SCHEDULING_POLICIES
from quire.models.registry import FAMILIES
from tests.repository.source_files import ROOT, name_of

MAX_README_LINES = 120
MAX_README_COLUMNS = 100
_LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
_TARGET = re.compile(r"^([a-z][\w-]*):", re.M)


def _documents() -> list[Path]:
    top = [file for file in ROOT.glob("*.md") if file.is_file()]
    return sorted([*top, *(ROOT / "docs").rglob("*.md")])


def _readme() -> str:
    return (ROOT / "README.md").read_text(encoding="utf-8")


def _code(text: str) -> str:
    """Return the content of code blocks and backticks."""
    blocks = re.findall(r"```[^\n]*\n(.*?)```", text, re.S)
    without = re.sub(r"```.*?```", "", text, flags=re.S)
    return "\n".join([*blocks, *re.findall(r"`([^`\n]+)`", without)])


def test_the_readme_is_short() -> None:
    lines = _readme().splitlines()
    assert len(lines) <= MAX_README_LINES
    assert not [line for line in lines if len(line) > MAX_README_COLUMNS]


def test_the_comparison_counts_what_there_is() -> None:
    rows = dict(re.findall(r"^\| ([\w ]+) \| (\d+)\b", _readme(), re.M))
    assert rows == {
        "Text architectures": str(len(FAMILIES)),
        "Scheduling policies": str(len(SCHEDULING_POLICIES)),
    }


def test_every_relative_link_has_a_target() -> None:
    lost = []
    for document in _documents():
        for link in _LINK.findall(document.read_text(encoding="utf-8")):
            if re.match(r"[a-z]+:", link):
                continue
            page, _, anchor = link.partition("#")
            target = document.parent / page if page else document
            if not target.exists() or (anchor and anchor not in _anchors(target)):
                lost.append(f"{name_of(document)}: {link}")
    assert not lost


def _anchors(page: Path) -> set[str]:
    """Return the anchors that a renderer makes of headings, and those written as `<a id>`."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.S)
    headings = [re.sub(r"[`*]", "", line).lower() for line in re.findall(r"^#+ (.+)$", text, re.M)]
    slugs = {re.sub(r"[^\w -]", "", heading).strip().replace(" ", "-") for heading in headings}
    return slugs | set(re.findall(r'<a id="([^"]+)"', text))


def test_every_named_make_target_exists() -> None:
    targets = set(_TARGET.findall((ROOT / "Makefile").read_text(encoding="utf-8")))
    unknown = [
        f"{name_of(document)}: make {name}"
        for document in _documents()
        for name in re.findall(
            r"(?:^|[\s`])make ([a-z][\w-]*)", _code(document.read_text(encoding="utf-8"))
        )
        if name not in targets
    ]
    assert not unknown


def test_every_named_subcommand_and_flag_exists() -> None:
    flags = {
        subcommand.name: {n for flag in subcommand.flags for n in flag.names}
        for subcommand in subcommand_words()
    }
    unknown = []
    for document in _documents():
        code = _code(document.read_text(encoding="utf-8"))
        for subcommand, rest in re.findall(r"(?:^|[\s/])quire ([a-z]+)\b([^\n#]*)", code):
            if subcommand in ("import", "package"):
                continue
            named = re.findall(r"(?<!\w)--[a-z][\w-]*", rest)
            if subcommand not in SUBCOMMANDS or set(named) - flags[subcommand]:
                unknown.append(f"{name_of(document)}: quire {subcommand} {' '.join(named)}")
    assert not unknown


def test_the_readme_names_the_first_commands() -> None:
    code = _code(_readme())
    assert "make demo" in code
    assert "make test" in code
    assert re.search(r"quire serve\b", code)
    start = _code((ROOT / "docs" / "start.md").read_text(encoding="utf-8"))
    for subcommand in ("serve", "chat", "complete", "program"):
        assert re.search(rf"quire {subcommand}\b", start)


def test_every_named_source_file_exists() -> None:
    records = ("EXPERIMENTS.md", "CHANGELOG.md")  # historical records
    pattern = re.compile(r"(?<![\w/])(?:quire|tests|bench|native|scripts)/[\w/.-]+\.\w+")
    lost = []
    for document in (file for file in _documents() if file.name not in records):
        named = set(pattern.findall(_code(document.read_text(encoding="utf-8"))))
        written = [name for name in named if "NAME" not in name and "/results/" not in name]
        # a package's page names files relative to it
        roots = (ROOT, ROOT / "quire" / document.stem)
        lost += [
            f"{document.name}: {name}"
            for name in written
            if not any((root / name).exists() for root in roots)
        ]
    assert not sorted(lost)
