"""A headless Chromium, and a server on the built-in model (`make browser`).

The tests need selenium and Debian's chromium and chromium-driver, or others on PATH; without
selenium nothing is collected, and without a browser each test is skipped.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.serve.running_server import ROOT, RunningServer

if TYPE_CHECKING:
    from tests.browser.page import Page

collect_ignore_glob = [] if find_spec("selenium") else ["test_*.py"]


@pytest.fixture(scope="session")
def tools() -> tuple[str, str]:
    """Return the paths of the browser and its driver."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser")
    driver = shutil.which("chromedriver")
    if browser is None or driver is None:
        pytest.skip("no chromium and chromedriver on PATH (apt install chromium chromium-driver)")
    return browser, driver


@pytest.fixture(scope="session")
def server(tools: tuple[str, str]) -> Iterator[RunningServer]:
    flags = ("--max-num-seqs", "4")
    with RunningServer(ROOT / "quire/models/box", *flags) as running:
        yield running


@pytest.fixture
def page(tools: tuple[str, str], server: RunningServer, tmp_path: Path) -> Iterator[Page]:
    """A page of its own; fails if the browser reported a violation of the policy or an error."""
    from tests.browser.page import Page

    opened = Page(*tools, server.url, tmp_path)
    try:
        yield opened
        assert opened.problems() == []
    finally:
        opened.close()
