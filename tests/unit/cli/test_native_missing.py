"""A checkout that was not built: commands and the library say what to do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]

# Imports as in a checkout without the compiled module, for each statement in turn.
_SCRIPT = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name == "quire._native":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
import quire
from quire.base.errors import SettingError
from quire.cli.main import main

for words in (["serve"], ["complete", "-p", "x"], ["plan", "x"], ["bench", "latency"]):
    print(main(words))
try:
    quire.LLM()
except SettingError as error:
    print(error)
"""


@pytest.fixture(scope="module")
def done() -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", _SCRIPT], capture_output=True, text=True, cwd=ROOT, timeout=120
    )


def test_commands_and_the_library_name_the_build(done: subprocess.CompletedProcess[str]) -> None:
    *codes, message = done.stdout.splitlines()
    assert codes == ["2"] * 4
    assert done.stderr.count("quire._native, the compiled part of Quire, is not in") == 4
    assert "pip install ." in message
    assert "Traceback" not in done.stderr
