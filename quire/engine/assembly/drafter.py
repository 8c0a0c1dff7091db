"""The source of draft tokens of an engine: its proposers and their control.

Knows no executor. Always holds: an engine has one proposer of its own beside the
predictions that requests bring.
"""

from __future__ import annotations

from quire.base.report import Report
from quire.speculative.control import AdaptiveControl
from quire.speculative.drafter import Drafter
from quire.speculative.ngram import NgramProposer
from quire.speculative.prediction import PredictionProposer
from quire.speculative.proposer import Proposer


def make_drafter(
    max_drafts: int,
    *,
    num_slots: int,
    vocab_size: int,
    report: Report,
    proposer: Proposer | None = None,
) -> Drafter:
    """Return a source of up to max_drafts draft tokens a step for requests that speculate.

    proposer: in place of prompt lookup.
    """
    return Drafter(
        NgramProposer(num_slots) if proposer is None else proposer,
        PredictionProposer(num_slots),
        AdaptiveControl(num_slots, max_drafts),
        num_slots=num_slots,
        max_drafts=max_drafts,
        vocab_size=vocab_size,
        report=report,
    )
