"""The path of one streamed chat: few files, and docs/reading.md lists them.

The files are recorded by running one request (scripts/trace_request.py). A feature that a request
does not use must not be on its path.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

from tests.repository.source_files import ROOT

# Raise none of these: a new feature stays off the path of requests that do not use it.
MAX_FILES = 60
MAX_SCHEDULER_FILES = 12
MAX_LINES = 14_000
# Which of a few files is entered depends on how threads meet.
MAX_DIFFERENT = 4


@pytest.fixture(scope="module")
def entered() -> dict[str, int]:
    """Return the lines of each file that one streamed chat enters."""
    command = [sys.executable, str(ROOT / "scripts" / "trace_request.py"), "--json"]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout
    return dict(json.loads(printed.splitlines()[-1]))


def test_one_streamed_chat_enters_few_files(entered: dict[str, int]) -> None:
    in_scheduler = [path for path in entered if path.startswith("quire/scheduler/")]
    print("\n".join(entered))
    assert len(entered) <= MAX_FILES
    assert len(in_scheduler) <= MAX_SCHEDULER_FILES
    assert sum(entered.values()) <= MAX_LINES


def test_the_reading_page_lists_the_files_on_the_path(entered: dict[str, int]) -> None:
    page = (ROOT / "docs" / "reading.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"^\| `(quire/[\w/]+\.py)`", page, re.M))
    different = sorted(listed ^ set(entered))
    assert len(different) <= MAX_DIFFERENT, "run python scripts/trace_request.py --write"
