"""Settings of speculative decoding: what proposes tokens, and how many.

Only single values and their combinations are checked here; a draft model or heads are read where
they are loaded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from quire.base.errors import SettingError
from quire.base.speculation_params import MAX_DRAFT_TOKENS
from quire.config.proposer_kinds import (
    HEADS,
    PROPOSERS,
    WITH_FILES,
    ProposerName,
    any_of,
)
from quire.config.settings import at_least, at_most, one_of, setting


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationConfig:
    """Speculative decoding."""

    speculate: Literal["off", ProposerName] = setting(
        "off",
        "speculative decoding of requests that do not set it (field speculation): "
        + ", ".join(f"{name}: {kind.proposes}" for name, kind in PROPOSERS.items())
        + "; answers do not change",
    )
    draft_model: str | None = setting(
        None,
        "smaller model with the same tokenizer that proposes tokens: a directory, a GGUF file, or "
        "ORG/NAME; or draft heads trained for the model; default with --speculate draft "
        "and eagle: what comes with the built-in model",
    )
    self_draft_layers: int | None = setting(
        None,
        "how many of the model's first layers propose tokens, fewer than all; default with "
        "--speculate self: measured at the start",
    )
    speculate_history_tokens: int = setting(
        0,
        "number of output tokens of each tenant (and cache_salt) that have ended, in which prompt "
        "lookup also finds what followed the last tokens, at most 16777216; 0: none are kept",
    )
    max_draft_tokens: int = setting(
        8,
        f"maximum number of proposed tokens of a request in one step, 0 to {MAX_DRAFT_TOKENS}; 0: "
        "none, whatever requests ask for",
    )

    def __post_init__(self) -> None:
        one_of("speculate", self.speculate, ("off", *PROPOSERS))
        if not 0 <= self.max_draft_tokens <= MAX_DRAFT_TOKENS:
            raise SettingError(
                f"max_draft_tokens is {self.max_draft_tokens}; it must be 0 to {MAX_DRAFT_TOKENS}"
            )
        if self.speculate != "off" and not self.max_draft_tokens:
            raise SettingError(
                f"speculate is {self.speculate} and max_draft_tokens is 0; set --speculate off, or "
                "allow draft tokens"
            )
        self._check_history()
        if self.self_draft_layers is not None:
            at_least("self_draft_layers", self.self_draft_layers, 1)
            other = ""
            if not self.max_draft_tokens:
                other = "max_draft_tokens is 0"
            elif self.draft_model is not None:
                other = "a draft model is given"
            elif self.speculate not in ("off", "self"):
                other = f"speculate is {self.speculate}"
            if other:
                raise SettingError(
                    f"self_draft_layers is {self.self_draft_layers} and {other}, so that it would "
                    "never be used; set --speculate self, or leave it out"
                )
        if self.draft_model is None:
            return
        if not self.draft_model:
            raise SettingError("draft_model is empty; give a model, or leave it out")
        uses_files = self.speculate == "off" or PROPOSERS[self.speculate].needs_files
        if not uses_files or not self.max_draft_tokens:
            reason = f"speculate is {self.speculate}"
            reason = reason if self.max_draft_tokens else "max_draft_tokens is 0"
            raise SettingError(
                f"draft_model is {self.draft_model} and {reason}, so that it would never be used; "
                f"set --speculate {any_of(name for name in WITH_FILES if name not in HEADS)} "
                f"({any_of(HEADS)} for heads), or leave it out"
            )

    @property
    def is_set(self) -> bool:
        """Whether the settings name a proposer. Without, requests that ask have prompt lookup."""
        return bool(
            self.speculate != "off"
            or self.draft_model is not None
            or self.self_draft_layers is not None
            or self.speculate_history_tokens
        )

    @property
    def proposer(self) -> ProposerName | None:
        """Return the proposer of the engine; None where the files of draft_model decide it."""
        if self.speculate != "off":
            return self.speculate
        if self.self_draft_layers is not None:
            return "self"
        return "ngram" if self.draft_model is None else None

    def _check_history(self) -> None:
        num = self.speculate_history_tokens
        at_least("speculate_history_tokens", num, 0)
        at_most("speculate_history_tokens", num, 1 << 24, "in 16 histories: 5 GiB")
        if not num:
            return
        other = ""
        if not self.max_draft_tokens:
            other = "max_draft_tokens is 0"
        elif self.speculate not in ("off", "ngram"):
            other = f"speculate is {self.speculate}"
        elif self.draft_model is not None or self.self_draft_layers is not None:
            other = "something else than prompt lookup drafts"
        if other:
            raise SettingError(
                f"speculate_history_tokens is {num} and {other}, so that they would never be used; "
                "set --speculate ngram, or leave it out"
            )
