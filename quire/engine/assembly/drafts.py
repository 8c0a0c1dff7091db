"""The source of draft tokens of an engine: its proposers and their control.

Decides from the configuration how many drafts the executor verifies; refuses what it cannot do.
"""

from __future__ import annotations

from quire.base.errors import SettingError
from quire.base.report import Report
from quire.config.groups import EngineConfig
from quire.speculative.control import AdaptiveControl
from quire.speculative.drafter import Drafter
from quire.speculative.ngram import NgramProposer
from quire.speculative.prediction import PredictionProposer
from quire.speculative.proposer import CostlyProposer


def max_draft_tokens(config: EngineConfig) -> int:
    """Return the most draft tokens of a step; 0 where the executor verifies none.

    Raises SettingError where speculation is asked for and cannot be had.
    """
    settings = config.scheduler
    if config.executor.executor != "torch":
        return settings.max_draft_tokens
    if settings.speculate != "off" or settings.draft_model is not None:
        given = f"speculate is {settings.speculate}"
        given = "a draft model is given" if settings.speculate == "off" else given
        raise SettingError(
            f"{given} and executor is torch, which does not verify draft "
            "tokens yet; set --speculate off, or take --executor native"
        )
    return 0


def make_drafter(
    max_drafts: int,
    *,
    num_slots: int,
    vocab_size: int,
    report: Report,
    model: CostlyProposer | None = None,
) -> Drafter:
    """Return a source of up to max_drafts draft tokens a step for requests that speculate.

    model: proposes in place of prompt lookup.
    """
    return Drafter(
        NgramProposer(num_slots) if model is None else model,
        PredictionProposer(num_slots),
        AdaptiveControl(num_slots, max_drafts),
        num_slots=num_slots,
        max_drafts=max_drafts,
        vocab_size=vocab_size,
        report=report,
    )
