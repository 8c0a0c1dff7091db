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
    """Return the most draft tokens of a request in a step.

    Raises SettingError where speculation is asked for and cannot be had.
    """
    settings = config.scheduler
    if config.executor.executor != "torch":
        return settings.max_draft_tokens
    given = ""
    if settings.draft_model is not None:
        given = "a draft model is given"
    elif settings.drafts_itself:
        given = "the first layers of the model are to draft"
    elif settings.speculate == "draft":
        given = "speculate is draft"
    if given:
        raise SettingError(
            f"{given} and executor is torch, which verifies draft tokens and computes none yet; "
            "set --speculate ngram or off, or take --executor native"
        )
    return settings.max_draft_tokens


def make_drafter(
    max_drafts: int,
    *,
    num_slots: int,
    vocab_size: int,
    report: Report,
    model: CostlyProposer | None = None,
    drafter: type[Drafter] = Drafter,
) -> Drafter:
    """Return a source of up to max_drafts draft tokens a step for requests that speculate.

    model: proposes in place of prompt lookup. drafter: the class of the source.
    """
    return drafter(
        NgramProposer(num_slots) if model is None else model,
        PredictionProposer(num_slots),
        AdaptiveControl(num_slots, max_drafts),
        num_slots=num_slots,
        max_drafts=max_drafts,
        vocab_size=vocab_size,
        report=report,
    )
