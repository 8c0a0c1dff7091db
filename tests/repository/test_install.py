"""Installing from source: the progress of the build, and what a missing compiler leads to."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from scripts.install import Progress, install, requirements
from tests.repository.source_files import ROOT

_NO_COMPILER = (ROOT / "native" / "compiler-missing.txt").read_text("utf-8")
_OUTPUT = """Collecting numpy>=1.26
  *** Configuring CMake...
  *** Building project with Ninja...
  [34/107] Building CXX object CMakeFiles/quire_avx2.dir/native/src/norm.cc.o
"""


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def _printing(text: str, *, code: int = 0, wait_s: float = 0.0) -> list[str]:
    program = (
        f"import sys, time; print({text!r}, flush=True); time.sleep({wait_s}); sys.exit({code})"
    )
    return [sys.executable, "-c", program]


def test_the_phase_follows_the_output_of_pip_and_ninja() -> None:
    progress, phases = Progress(), []
    for line in _OUTPUT.splitlines():
        progress.read(line)
        phases.append(progress.text(7.2))
    assert phases == [
        "[2/3] downloading, 7 s",
        "[2/3] configuring, 7 s",
        "[2/3] compiling, 7 s",
        "[2/3] compiling 34 of 107 files, 7 s",
    ]
    progress.read("[ 50%] Building CXX object norm.cc.o")
    assert progress.text(9.0) == "[2/3] compiling 50 %, 9 s"


def test_a_terminal_shows_the_compiled_files() -> None:
    terminal = Terminal()
    assert install(_printing(_OUTPUT, wait_s=2.0), "installing", terminal) == 0
    assert "\r\033[K[2/3] compiling 34 of 107 files, " in terminal.getvalue()


def test_a_pipe_gets_a_line_before_and_one_after() -> None:
    pipe = io.StringIO()
    assert install(_printing(_OUTPUT), "installing quire-llm[demo]", pipe) == 0
    before, after = pipe.getvalue().splitlines()
    assert before == "installing quire-llm[demo]"
    assert after.startswith("[2/3] installed in ")


def test_a_failure_shows_the_output_of_pip() -> None:
    pipe = io.StringIO()
    assert install(_printing("no room", code=3), "installing", pipe) == 3
    assert pipe.getvalue().splitlines()[1] == "no room"


def test_packages_of_extras_come_with_those_of_the_checkout() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    extras = project["optional-dependencies"]
    assert requirements("") == project["dependencies"]
    assert requirements("[gpu,manifests]") == [
        *project["dependencies"],
        *extras["gpu"],
        *extras["manifests"],
    ]


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_the_compiled_module_of_one_target_serves_all(tmp_path: Path) -> None:
    """Run make with a stand-in for Python that writes down what it is asked to do."""
    venv, calls = tmp_path / "venv", tmp_path / "calls"
    (venv / "bin").mkdir(parents=True)
    for name in ("python", "mkdocs", "ruff", "mypy", "lint-imports"):
        program = venv / "bin" / name
        program.write_text(f'#!/bin/sh\necho "$@" >> {calls}\n')
        program.chmod(0o755)
    targets = ["lint", "test", "exact", "docs", "parity", "gpu", "fuzz", "manifests", "test"]
    done = subprocess.run(
        ["make", "--no-print-directory", *targets, f"VENV={venv}"],
        cwd=ROOT,
        env={**os.environ, "MAKEFLAGS": "", "MAKELEVEL": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    installs = [call for call in calls.read_text().splitlines() if "scripts/install.py" in call]
    python = venv / "bin" / "python"
    extras = [
        "test,lint",
        "test",
        "test,docs",
        "test,parity",
        "test,gpu",
        "test,fuzz",
        "test,manifests",
    ]
    added = [f"scripts/install.py --packages-only {python} [{extra}]" for extra in extras]
    assert installs == [added[0], f"scripts/install.py {python}", *added[1:]]


def test_the_message_names_the_package_of_each_system() -> None:
    for package in ("apt install g++", "dnf install gcc-c++", "xcode-select --install"):
        assert package in _NO_COMPILER


@pytest.mark.skipif(shutil.which("cmake") is None, reason="needs cmake")
def test_cmake_without_a_compiler_names_the_package(tmp_path: Path) -> None:
    done = subprocess.run(
        ["cmake", "-S", str(ROOT), "-B", str(tmp_path)],
        env={**os.environ, "CXX": str(tmp_path / "no-such-compiler")},
        capture_output=True,
        text=True,
    )
    assert done.returncode != 0
    for line in _NO_COMPILER.splitlines():
        assert line.strip() in done.stderr


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_make_without_a_compiler_names_the_package_before_pip_runs(tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    done = subprocess.run(
        ["make", "--no-print-directory", "demo", f"VENV={venv}", f"PYTHON={sys.executable}"],
        cwd=ROOT,
        env={**os.environ, "CXX": "no-such-compiler", "MAKEFLAGS": "", "MAKELEVEL": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode != 0
    assert done.stdout == _NO_COMPILER
    assert not venv.exists()
