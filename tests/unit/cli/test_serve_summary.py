"""What `quire serve` prints once it is ready says whether chats are served."""

from __future__ import annotations

from dataclasses import replace

import pytest

from quire.cli.serve import _summary
from tests.unit.api.fake_engine import CARD


@pytest.mark.parametrize(
    ("problems", "generates", "line"),
    [
        (None, True, "chats    not served: the model has no chat template (--chat-template)"),
        (None, False, ""),  # it makes embeddings
        ([], True, ""),
        (["line 2 is wrong"], True, "chats    not served: line 2 is wrong"),
    ],
)
def test_the_summary_says_why_chats_are_not_served(
    problems: list[str] | None, generates: bool, line: str
) -> None:
    card = replace(CARD, generates=generates)
    said = _summary(card, ("weights 1 MiB",), problems, ["http://127.0.0.1:8000"]).splitlines()
    assert [one for one in said if one.startswith("chats")] == ([line] if line else [])
