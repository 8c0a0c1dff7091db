"""How a command that trains ends: its exit code and its last line."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.base.errors import ModelError, SettingError
from quire.train.exit_code import exit_code


def raising(error: BaseException) -> None:
    raise error


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (SettingError("no prompt"), 1, "error: no prompt"),
        (ModelError("no model"), 1, "error: no model"),
        (
            KeyboardInterrupt(),
            130,
            "interrupted: the same command, run again, continues from the texts and the checkpoint "
            "in heads, as far as there are any",
        ),
    ],
)
def test_what_ends_a_training_is_one_line(
    error: BaseException, code: int, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code(lambda: raising(error), Path("heads")) == code
    assert capsys.readouterr().err == f"{line}\n"


def test_a_training_that_is_done_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(lambda: None, Path("heads")) == 0
    assert not capsys.readouterr().err
