"""Counts of several processes are shown as sums, and outlive the processes."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.repository.source_files import ROOT

# A separate process: the storage of counts is fixed when the library is imported.
COUNTING = """
import sys
from pathlib import Path
from quire.obs.shared import forget_process, share_counts
folder = Path(sys.argv[1])
share_counts(folder)
from quire.base.engine_stats import EngineStats
from quire.obs.metrics import Metrics
from quire.obs.series import restarts_counter
metrics = Metrics(("a",), shared=folder, sees_steps=sys.argv[2] == "first")
metrics.opened()
metrics.answered(route="/x", status=200)
metrics.opened()
metrics.choice(finish_reason="stop", times=None, prompt_tokens=3, output_tokens=5)
metrics.see(EngineStats(steps_total=7, step_rows=2, running=4))
if sys.argv[2] == "first":
    restarts_counter().inc()
if sys.argv[2] == "last":
    for gone in sys.argv[3:]:
        forget_process(folder, int(gone))
    print(metrics.text().decode())
else:
    import os
    print(os.getpid())
"""


def counted(folder: Path, *arguments: str) -> str:
    command = [sys.executable, "-c", COUNTING, str(folder), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout


def test_counters_are_summed_and_gauges_are_of_live_processes(tmp_path: Path) -> None:
    first, second = (counted(tmp_path / "counts", which).strip() for which in ("first", "second"))
    text = counted(tmp_path / "counts", "last", first)

    def shown(name: str) -> list[str]:
        return re.findall(rf"^{name}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)

    assert second.isdigit()
    assert shown("quire_generated_tokens_total") == ["15.0"]
    assert shown("quire_http_responses_total") == ["3.0"]
    assert shown("quire_open_requests") == ["2.0"]
    assert shown("quire_api_process_restarts_total") == ["1.0"]
    # a step counts once, however many clients get it
    assert shown("quire_batch_rows_count") == ["1.0"]
    assert shown("quire_running_requests") == ["4.0"]  # nor are the engine's numbers added up
    assert shown("quire_tenant_running_requests") == ["0.0"]
