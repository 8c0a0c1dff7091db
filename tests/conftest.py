"""A bytecode cache for the tests and the processes that they start, and lines for the summary.

The suite starts several hundred processes. If the environment forbids writing bytecode beside the
sources, each of them would compile some 400 modules again, which is half of its startup time. A
test that measures coverage or sizes reports it at the end of the run by `record_property(SHOWN,
text)`, which works from other processes as well.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import quire  # noqa: F401  holds BLAS to one thread, which must happen before NumPy loads
from tests.drawn import DRAWS_ALL


def _keep_bytecode() -> None:
    """Keep bytecode in pytest's cache, or in a temporary directory where that cannot be written."""
    folder = Path(__file__).parents[1] / ".pytest_cache" / "d" / "bytecode"
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK):  # none there, or another user's
        folder = Path(tempfile.mkdtemp(prefix="quire-tests-bytecode-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix = str(folder)
    sys.dont_write_bytecode = False


if sys.dont_write_bytecode:
    _keep_bytecode()  # before hypothesis, of which pytest rewrites and compiles a hundred modules

with contextlib.suppress(ImportError):  # environments of clients do without hypothesis
    from hypothesis import HealthCheck, settings

    # Tests assert no times, and pass on a busy machine.
    settings.register_profile("quire", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("quire")

SHOWN = "shown in the summary"
MARKED_FOLDERS = (
    "browser",
    "fuzz",
    "gpu",
    "ray",
)  # all tests of each have its name as their marker
# Files of these folders share models, syntax trees or tokenizers within a process. With all drawn
# cases, those of tests/exact take minutes, many times what they share, and are divided.
SHARED_FOLDERS = (
    *(() if DRAWS_ALL else ("tests/exact/",)),
    *("tests/repository/", "tests/unit/text/"),
)
LONGEST_UNITS = (
    "tests/exact/",
    "tests/unit/text/",
    "tests/kernels/test_sampling_rare.py",
    "tests/repository/",
    "tests/models/test_ranks.py",
    "tests/serve/test_supervised_engine.py",
    "tests/unit/scheduler/test_timeline.py",
    "tests/serve/test_launched.py",
    "tests/unit/scheduler/test_properties.py",
    "tests/models/test_context.py",
    "tests/kernels/test_attention_rows.py",
    "tests/serve/test_data_parallel.py",
    "tests/serve/test_life.py",
    "tests/serve/test_hostile.py",
    "tests/unit/engine/test_ranks.py",
    "tests/serve/test_ollama.py",
    "tests/unit/bench/test_verbs.py",
    "tests/unit/engine/test_draft_heads.py",
    "tests/unit/engine/test_structured.py",
    "tests/unit/engine/process/test_main.py",
    "tests/unit/scheduler/prefill/test_layered.py",
    "tests/unit/engine/test_memory.py",
    "tests/unit/structured/test_sample.py",
    "tests/models/test_recorded_parity.py",
    "tests/serve/test_router.py",
    "tests/serve/test_api_processes.py",
    "tests/serve/test_disaggregation.py",
    "tests/unit/api/ollama/test_ollama.py",
    "tests/unit/ranks/test_connected.py",
    "tests/serve/test_bad_input.py",
    "tests/kernels/test_int_linear.py",
    "tests/unit/sim/test_drafts.py",
)


def pytest_configure(config: pytest.Config) -> None:
    """Send one message a test, in a process of pytest-xdist."""
    if hasattr(config, "workerinput"):
        from tests.work_units import send_tests_at_once

        send_tests_at_once(config)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import tests that the marker expression leaves out: it costs seconds a process."""
    folder = collection_path.name
    is_left_out = folder in MARKED_FOLDERS and f"not {folder}" in config.getoption("markexpr")
    return True if is_left_out else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start the longest units first, so that no process runs one alone at the end."""
    items.sort(key=lambda item: _place_of_unit(unit_of(item.nodeid)))


@cache
def _place_of_unit(unit: str) -> int:
    longest = (place for place, start in enumerate(LONGEST_UNITS) if unit.startswith(start))
    return next(longest, len(LONGEST_UNITS))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Run a unit in one process, in the order of collection (for `--dist loadfile`)."""
    if config.getoption("dist") != "loadfile":
        return None
    from tests.work_units import UnitScheduling

    return UnitScheduling(config, log)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes() -> None:
    """Expect one message a test from the processes that run tests."""
    from tests.work_units import receive_tests_at_once

    receive_tests_at_once()


def unit_of(nodeid: str) -> str:
    """Return the file of a test, or its folder if the files of that share costly fixtures."""
    shared = next((folder for folder in SHARED_FOLDERS if nodeid.startswith(folder)), None)
    return shared or nodeid.partition("::")[0]


def pytest_collectstart() -> None:
    """Leave garbage until the end of the collection; it would take a fifth of its time."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Exempt modules and collected tests from garbage collection: they live to the end.

    Otherwise each full collection traverses the objects of all tests. What tests make is collected
    less often than by default.
    """
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
    gc.enable()


@pytest.fixture(scope="module", autouse=True)
def _garbage_collected() -> Iterator[None]:
    """Collect garbage after each file, so that what it has left open is a warning in its last test,
    not in one of any file that comes later."""
    yield
    gc.collect()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what tests recorded for the summary."""
    for reports in terminalreporter.stats.values():
        for report in reports:
            for name, text in getattr(report, "user_properties", ()):
                if name == SHOWN and report.when == "call":
                    terminalreporter.write_line(text)
