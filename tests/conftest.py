"""A bytecode cache for the tests and the processes that they start, and lines for the summary.

The suite starts several hundred processes. If the environment forbids writing bytecode beside the
sources, each of them would compile some 400 modules again, which is half of its startup time. A
test that measures coverage or sizes reports it at the end of the run by `record_property(SHOWN,
text)`, which works from other processes as well.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path

import pytest

SHOWN = "shown in the summary"


def pytest_configure(config: pytest.Config) -> None:
    """Keep bytecode in pytest's cache, or in a temporary directory if there is none."""
    if not sys.dont_write_bytecode:
        return
    cache = getattr(config, "cache", None)
    if cache is not None:
        folder = Path(cache.mkdir("bytecode"))
    else:
        folder = Path(tempfile.mkdtemp(prefix="quire-tests-bytecode-"))
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix = str(folder)
    sys.dont_write_bytecode = False


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what tests recorded for the summary."""
    for reports in terminalreporter.stats.values():
        for report in reports:
            for name, text in getattr(report, "user_properties", ()):
                if name == SHOWN and report.when == "call":
                    terminalreporter.write_line(text)
