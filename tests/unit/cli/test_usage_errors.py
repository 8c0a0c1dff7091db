"""Wrong words on the command line, each answered with what to write instead."""

from __future__ import annotations

import pytest

from tests.unit.cli.command import quire_main


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("replay", "required: FILE (a recording that `quire record URL FILE` wrote)"),
    ],
)
def test_a_wrong_word_is_answered_with_the_right_one(words: str, said: str) -> None:
    done = quire_main(*words.split())
    assert done.returncode == 2
    assert said in done.stderr
