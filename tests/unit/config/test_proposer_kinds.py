"""The table of proposers: its names are those of the types, and everything else follows it."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from quire.base.errors import SettingError
from quire.config.flags import engine_config
from quire.config.foreign_flags import INSTEAD
from quire.config.proposer_kinds import (
    COMPUTED,
    HEADS,
    LOOKUPS,
    PROPOSERS,
    WITH_FILES,
    HeadName,
    ProposerName,
)
from quire.config.sources import SETTINGS
from tests.cases import each_case


def test_the_types_have_the_names_of_the_table() -> None:
    assert get_args(ProposerName) == tuple(PROPOSERS)
    assert get_args(HeadName) == HEADS
    assert {*LOOKUPS, *COMPUTED} == {*PROPOSERS}
    assert set(HEADS) <= set(WITH_FILES) <= set(COMPUTED)


def test_the_setting_and_flags_of_other_engines_name_them_all() -> None:
    setting = next(one for one in SETTINGS.values() if one.name == "speculate")
    assert get_args(setting.kind) == ("off", *PROPOSERS)
    help_text = setting.field.metadata["help"]
    for name, kind in PROPOSERS.items():
        assert f"{name}: {kind.proposes}" in help_text
        assert name in INSTEAD["--speculative-config"]


@each_case("degree", ["tensor", "pipeline", "context"])
@each_case("name", PROPOSERS)
def test_all_go_with_ranks_of_every_kind(name: ProposerName, degree: str) -> None:
    settings: dict[str, Any] = {"model": "m", "speculate": name, f"{degree}_parallel_size": 2}
    assert engine_config(settings).speculation.proposer == name


@pytest.mark.parametrize("name", PROPOSERS)
def test_files_that_a_proposer_does_not_read_are_refused(name: str) -> None:
    settings = {"model": "m", "speculate": name, "draft_model": "x"}
    if name in WITH_FILES:
        assert engine_config(settings).speculation.proposer == name
        return
    with pytest.raises(SettingError, match=f"speculate is {name}, so that it would never be used"):
        engine_config(settings)


def test_settings_without_a_name_decide_as_far_as_they_can() -> None:
    def proposer(**settings: Any) -> tuple[bool, str | None]:
        speculation = engine_config({"model": "m", **settings}).speculation
        return speculation.is_set, speculation.proposer

    assert proposer() == (False, "ngram")
    assert proposer(speculate_history_tokens=9) == (True, "ngram")
    assert proposer(self_draft_layers=1) == (True, "self")
    assert proposer(draft_model="x") == (True, None)
    assert proposer(speculate="ngram") == (True, "ngram")
