"""How the GPU check handles failures of its sections, and merges several results."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.gpu import __main__ as check
from bench.gpu.merge import merge
from bench.gpu.result import code_digest, write
from bench.gpu.supervise import supervised
from tests.repository.source_files import ROOT

FAULTS = {
    "pass": ("ok", "print('done')"),
    "raise ValueError": ("failed: exit code 1", "raise ValueError('a driver said no')"),
    "abort": ("failed: ended by SIGABRT", "import os; os.abort()"),
    "be killed for memory": (
        "failed: ended by SIGKILL",
        "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    ),
    "exit 3": ("failed: exit code 3", "import sys; sys.exit(3)"),
}
# Ignores every signal it can; so does its child, which writes its process id.
HANGS = """
import signal, subprocess, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
other = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
open(sys.argv[1], "w").write(str(other.pid))
while True:
    signal.pause()
"""


def _run(script: str, folder: Path, max_s: float, *more: str) -> tuple[str, str]:
    with (folder / "log").open("a+") as log:
        status = supervised(
            [sys.executable, "-c", script, *more],
            environment=os.environ,
            log=log,
            max_s=max_s,
            look=lambda: None,
        )
        log.seek(0)
        return status, log.read()


@pytest.mark.parametrize("fault", FAULTS)
def test_every_outcome_of_a_section_has_a_status(fault: str, tmp_path: Path) -> None:
    wanted, script = FAULTS[fault]
    status, said = _run(script, tmp_path, 600)
    assert status == wanted
    assert ("a driver said no" in said) == (fault == "raise ValueError")


def test_a_hanging_section_is_killed_with_its_children(tmp_path: Path) -> None:
    place = tmp_path / "pid"
    # However slow the machine: its time limit starts when it hangs.
    max_s = 1.0
    while True:
        status, _ = _run(HANGS, tmp_path, max_s, str(place))
        if place.exists() and (told := place.read_text()):
            break
        max_s *= 2
    assert status == f"failed: not done after {max_s:.0f} s"
    while _is_alive(int(told)):  # the system ends it in due time
        os.sched_yield()


WATCHES = """
import os, sys
from bench.gpu.supervise import supervised
with open(os.devnull, "w") as log:
    supervised(
        [sys.executable, "-c", sys.argv[1], sys.argv[2]],
        environment=os.environ, log=log, max_s=600, look=lambda: None,
    )
"""


def test_ending_the_check_ends_its_children(tmp_path: Path) -> None:
    place = tmp_path / "pid"
    command = [sys.executable, "-c", WATCHES, HANGS, str(place)]
    with subprocess.Popen(command, cwd=ROOT) as watching:
        while not (place.exists() and (told := place.read_text())):
            os.sched_yield()
        watching.terminate()
        assert watching.wait() == 128 + signal.SIGTERM
    while _is_alive(int(told)):
        os.sched_yield()


def test_split_utf8_in_a_sections_output_is_tolerated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut_off(*_: Any, log: Any, **__: Any) -> str:
        os.write(log.fileno(), "no driver \u2026".encode()[:-1])
        return "failed: not done after 1 s"

    monkeypatch.setattr(check, "supervised", cut_off)
    monkeypatch.setattr(sys, "argv", ["check", "--out", str(tmp_path), "--only", "limits"])
    assert check.main() == 1
    result = json.loads((tmp_path / "gpu-check.json").read_text())
    assert result["sections"]["limits"]["last_words"].startswith("no driver ")


def test_a_failing_section_reports_its_error_on_standard_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def failed(*_: Any, log: Any, **__: Any) -> str:
        os.write(log.fileno(), b"Traceback ...\nModuleNotFoundError: No module named 'torch'\n\n")
        return "failed: exit code 1"

    monkeypatch.setattr(check, "supervised", failed)
    monkeypatch.setattr(sys, "argv", ["check", "--out", str(tmp_path), "--only", "limits"])
    assert check.main() == 1
    told = capsys.readouterr().out
    assert told == "limits: failed: exit code 1: ModuleNotFoundError: No module named 'torch'\n"


def _is_alive(pid: int) -> bool:
    """Return whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def _result(**sections: str) -> dict[str, Any]:
    return {
        "what": "quire on a GPU",
        "code": "c0de",
        "machine": {"gpus": ["NVIDIA H200, 580.1"], "packages": {"torch": "2.11.0"}},
        "sections": {name: {"status": status, "seconds": 1.0} for name, status in sections.items()},
    }


def test_of_several_calls_the_best_of_each_section_is_kept() -> None:
    late = "not begun: the time is over"
    first = _result(build="ok", limits="ok", parity="failed: exit code 1", ready=late)
    second = _result(ready="ok", parity="ok", limits="failed: exit code 1", peer=late)
    merged = merge([first, second])
    found = {name: section["status"] for name, section in merged["sections"].items()}
    assert found == {"build": "ok", "limits": "ok", "parity": "ok", "peer": late, "ready": "ok"}
    assert list(found) == ["build", "limits", "parity", "peer", "ready"]
    assert merged["code"] == "c0de"


def test_results_of_other_code_or_another_gpu_are_not_merged() -> None:
    one = _result(build="ok")
    for part, other in (
        ("code", "0ther"),
        ("machine", one["machine"] | {"gpus": ["NVIDIA H100, 580.1"]}),
        ("machine", one["machine"] | {"packages": {"torch": "2.12.0"}}),
        ("what", "dry run: no measurement"),
    ):
        with pytest.raises(ValueError, match=part if part != "what" else "dry run"):
            merge([one, one | {part: other}])


def test_sections_of_other_code_keep_its_digest() -> None:
    first, second = _result(build="ok", limits="failed: exit code 1"), _result(limits="ok")
    merged = merge([first, second | {"code": "0ther"}], allow_other_code=True)
    assert merged["code"] == "c0de"
    assert merged["sections"]["limits"] == {"status": "ok", "seconds": 1.0, "code": "0ther"}
    assert "code" not in merged["sections"]["build"]


def test_another_driver_of_the_same_gpu_is_reported() -> None:
    other = _result(build="ok")
    other["machine"]["gpus"] = ["NVIDIA H200, 580.2"]
    merged = merge([_result(limits="ok"), other])
    assert merged["machine"]["gpus"] == ["NVIDIA H200, 580.1"]
    again = merge([_result(parity="ok"), merged])  # of an earlier merge
    for each in (merged, again):
        assert [machine["gpus"] for machine in each["other_machines"]] == [["NVIDIA H200, 580.2"]]


def test_a_result_is_written_atomically_with_its_code_digest(tmp_path: Path) -> None:
    write(tmp_path / "result.json", {"found": 1})
    assert json.loads((tmp_path / "result.json").read_text()) == {"found": 1}
    assert [file.name for file in tmp_path.iterdir()] == ["result.json"]
    file = tmp_path / "quire" / "a.py"
    file.parent.mkdir()
    file.write_text("1")
    before = code_digest(tmp_path)
    file.write_text("2")
    assert code_digest(tmp_path) != before
