"""The commands of documentation pages: each succeeds and prints what the page shows.

Pages of docs/recipes/ mark every block; of other pages the marked blocks run. One server on the
built-in model answers all pages that start `quire serve` without flags.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from tests.repository.source_files import ROOT
from tests.serve.recipe_pages import (
    PageError,
    PageRun,
    blocks_of,
    command_environment,
    own_server,
)
from tests.serve.running_server import RunningServer

RECIPES = ROOT / "docs" / "recipes"
# Pages for developers of this repository; their commands belong to other checks.
FOR_DEVELOPERS = "add-a-"
OTHER_PAGES = ("start.md", "errors.md", "structured-output.md", "tools.md")

pytestmark = [
    pytest.mark.docs,
    pytest.mark.skipif(not shutil.which("curl"), reason="the pages' commands need curl"),
]


def _recipes() -> list[Path]:
    return [
        page for page in sorted(RECIPES.glob("*.md")) if not page.name.startswith(FOR_DEVELOPERS)
    ]


@pytest.fixture(scope="module")
def shared() -> Iterator[RunningServer]:
    with own_server(()) as server:
        yield server


@pytest.fixture
def page_run(
    shared: RunningServer, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[PageRun]:
    @contextmanager
    def as_is() -> Iterator[RunningServer]:
        yield shared

    def serve(flags: tuple[str, ...]) -> AbstractContextManager[RunningServer]:
        return own_server(flags) if flags else as_is()

    environment = command_environment(tmp_path_factory.mktemp("bin"))
    with PageRun("page", tmp_path, environment, serve) as run:
        yield run


@pytest.mark.parametrize("page", _recipes(), ids=lambda page: page.stem)
def test_the_commands_of_a_recipe_work(page: Path, page_run: PageRun) -> None:
    assert page_run.run(page.read_text(encoding="utf-8"), all_marked=True)


@pytest.mark.parametrize("name", OTHER_PAGES)
def test_the_marked_commands_of_other_pages_work(name: str, page_run: PageRun) -> None:
    text = (ROOT / "docs" / name).read_text(encoding="utf-8")
    assert page_run.run(text, all_marked=False)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("<!-- run -->\n```sh\nquire serv\n```\n", "exits with 2"),
        ("<!-- run -->\n```sh\nfalse; true\n```\n", "exits with 1"),
        ("<!-- run -->\n```python\n1 / 0\n```\n", "ZeroDivisionError"),
        ("<!-- run -->\n```sh\necho 2\n```\n\n<!-- output -->\n```\n3\n```\n", "another output"),
        ("```sh\necho 2\n```\n", "no marker"),
        ("<!-- run -->\n```json\n{}\n```\n", "is json"),
    ],
)
def test_a_broken_page_fails(text: str, words: str, page_run: PageRun) -> None:
    with pytest.raises(PageError, match=words):
        page_run.run(text, all_marked=True)


def test_output_may_be_shortened_and_files_are_written(page_run: PageRun) -> None:
    text = (
        "<!-- file: a.txt -->\n```\none\ntwo\n```\n<!-- run -->\n```sh\ncat a.txt\n```\n"
        "<!-- output -->\n```\non...o\n```\n<!-- not run: needs a cluster -->\n```sh\nfalse\n```\n"
    )
    assert page_run.run(text, all_marked=True) == 3
    assert [block.kind for block in blocks_of(text)] == ["file", "run", "output", "not run"]
