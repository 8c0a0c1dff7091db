"""The table of proposers: its names are those of the types, and everything else follows it."""

from __future__ import annotations

import re
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
    RANK_SETTINGS,
    WITH_FILES,
    HeadName,
    ProposerName,
    RankSetting,
    any_of,
    refusal_beside,
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


@each_case("asked", RANK_SETTINGS)
@each_case("name", PROPOSERS)
def test_what_several_ranks_cannot_compute_is_refused(
    name: ProposerName, asked: RankSetting
) -> None:
    settings: dict[str, Any] = {"model": "m", "speculate": name, asked: 2}
    if not (reason := PROPOSERS[name].refused_with.get(asked)):
        assert engine_config(settings).speculation.proposer == name
        return
    others = [other for other in PROPOSERS if asked not in PROPOSERS[other].refused_with]
    advice = re.escape(f"{asked} is 2 and speculate is {name}, but {reason}: take --speculate ")
    with pytest.raises(SettingError, match=advice + any_of((*others, "off")) + f"; {name} goes"):
        engine_config(settings)


def test_ranks_go_with_lookups_and_leave_what_is_computed_to_rank_zero() -> None:
    def beside(*settings: RankSetting) -> list[str]:
        return [name for name in PROPOSERS if not refusal_beside(name, settings)]

    assert beside() == [*PROPOSERS]
    assert beside("tensor_parallel_size") == [*LOOKUPS, "draft", *HEADS]
    assert beside("tensor_parallel_size", "pipeline_parallel_size") == [*LOOKUPS, "draft"]
    assert beside("context_parallel_size") == [*LOOKUPS]


def test_files_may_hold_what_stages_go_with() -> None:
    given = {"model": "m", "draft_model": "x"}
    assert engine_config(given | {"pipeline_parallel_size": 2}).speculation.proposer is None
    with pytest.raises(SettingError, match="and draft_model is x, but what drafts has no KV"):
        engine_config(given | {"context_parallel_size": 2})


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
