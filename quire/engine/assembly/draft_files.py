"""Which proposer an engine has, and where the files of its weights lie.

Reads config.json at most. The files are those of --draft-model, or what comes with the built-in
model; a proposer over the model's own weights (DraftWeights.MODEL) has none.
"""

from __future__ import annotations

from pathlib import Path

from quire.base.errors import ConfigError, SettingError
from quire.base.user_path import user_path
from quire.config.groups import EngineConfig
from quire.config.proposer_kinds import PROPOSERS, ProposerName
from quire.engine.assembly.model_files import model_folder
from quire.models.head_kind import heads_in
from quire.models.model_folder import (
    box_path,
    check_model_folder,
    draft_box_path,
    head_box_path,
)


def proposer_of(config: EngineConfig) -> ProposerName:
    """Return the proposer of an engine, by its settings and the files of --draft-model.

    Raises SettingError where these contradict each other.
    """
    settings = config.speculation
    named = settings.proposer
    if settings.draft_model is None or (named is not None and not PROPOSERS[named].needs_files):
        assert named is not None, "without files the settings decide"
        return named
    found = heads_in(user_path(settings.draft_model))
    if named is None:
        return found or "draft"
    is_of_heads = PROPOSERS[named].reads_hidden_states
    if is_of_heads and found is None:
        try:
            check_model_folder(user_path(settings.draft_model))  # what is there, if it is no model
        except ConfigError as error:
            raise ConfigError(f"--draft-model {error}") from None
    if is_of_heads and found != named:
        what = "a draft model" if found is None else f"{found} heads"
        raise SettingError(
            f"speculate is {named}, and {settings.draft_model} holds {what}; set --speculate "
            f"{found or 'draft'}, or give the directory of {named} heads"
        )
    if not is_of_heads and found is not None:
        raise SettingError(
            f"speculate is {named}, and {settings.draft_model} holds {found} heads; set "
            f"--speculate {found}"
        )
    return named


def draft_folder(config: EngineConfig, name: ProposerName) -> Path:
    """Return the files of the weights of proposer `name`: given, or built in.

    Raises SettingError where there are none.
    """
    kind = PROPOSERS[name]
    assert kind.needs_files, "its weights are in files of their own"
    if config.speculation.draft_model is not None:
        return user_path(config.speculation.draft_model)
    is_built_in = model_folder(config.model).resolve() == box_path().resolve()
    if kind.reads_hidden_states:
        if is_built_in:
            return head_box_path(name)
        raise SettingError(
            f"speculate is {name} and no heads are given; give --draft-model, the directory of "
            f"{name} heads trained for {config.model.model} (python -m quire.train.{name} trains "
            "some), or set --speculate ngram, which needs none"
        )
    if is_built_in:
        return draft_box_path()
    raise SettingError(
        f"speculate is {name} and no draft model is given; give --draft-model, a smaller model "
        f"with the tokenizer of {config.model.model}, or set --speculate ngram, which needs none"
    )
