"""Draft sources of the exact tests: proposers that know the answer and change some of its tokens.

Each request's answer is that of the request run alone. Whatever is proposed, every token and
log-probability must stay as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

import numpy as np
from numpy.typing import NDArray

from quire.base.records import Request
from quire.base.report import Field
from quire.base.token_table import TokenTable
from quire.execute.executor import Executor
from quire.runner.draft_runner import DraftRunner
from quire.speculative.control import AdaptiveControl, Control, FixedControl
from quire.speculative.draft_model import ModelProposer
from quire.speculative.drafter import Drafter
from quire.speculative.history import HistoryProposer
from quire.speculative.ngram import NgramProposer
from quire.speculative.passes import DraftLimits
from quire.speculative.prediction import PredictionProposer
from quire.speculative.proposer import CostlyProposer, Drafts, Proposer
from quire.speculative.self_draft import SelfProposer
from tests.exact.workload import MAX_MODEL_LEN, VOCAB_SIZE, Settings

MAX_BLOCK_SIZE = 128  # of a KV cache in one process
Answer = Callable[[Request], list[int]]
# Whether the token at an output position is proposed as it is in the answer.
IS_RIGHT: dict[str, Callable[[int], bool]] = {
    "right": lambda at: True,
    "wrong": lambda at: False,
    "alternating": lambda at: at % 2 == 0,
    "sometimes": lambda at: at * 7919 % 5 > 0,
}


class OracleProposer(Proposer):
    """Proposes the tokens of the answer, changed where is_right is not true of their position."""

    name = "oracle"

    def __init__(self, answer: Answer, is_right: Callable[[int], bool]) -> None:
        self._answer, self._is_right = answer, is_right
        self._drafts: dict[int, list[int]] = {}

    def begin(self, slot: int, request: Request) -> None:
        self._drafts[slot] = [
            token_id if self._is_right(at) else (token_id + 1 + at % 3) % VOCAB_SIZE
            for at, token_id in enumerate(self._answer(request))
        ]

    def end(self, slot: int) -> None:
        self._drafts.pop(slot, None)  # unknown where `begin` was made to fail

    def propose(
        self,
        tokens: TokenTable,
        slots: NDArray[np.intp],
        limits: NDArray[np.int32],
        drafts: Drafts,
    ) -> None:
        for row, slot in enumerate(slots.tolist()):
            at = int(tokens.lengths[slot] - tokens.prompt_lengths[slot])
            found = self._drafts[slot][at : at + int(limits[row])]
            drafts.ids[row, : len(found)] = found
            drafts.counts[row] = len(found)

    def verified(
        self, slots: NDArray[np.intp], drafted: NDArray[np.int32], accepted: NDArray[np.int32]
    ) -> None:
        assert (drafted > 0).all()
        assert (accepted <= drafted).all()


def model_proposer(executor: Executor, settings: Settings, max_model_len: int) -> ModelProposer:
    """Return a proposer that computes the target itself, with a cache of its own, often small."""
    size = draft_block_size(settings)
    executor.allocate_cache(settings.draft_blocks, size)
    runner = DraftRunner(
        executor,
        num_slots=settings.max_num_seqs,
        max_model_len=max_model_len,
        block_size=size,
        max_samples=settings.max_samples,
        shares_noise=settings.draft_noise,
    )
    limits = DraftLimits(
        num_slots=settings.max_num_seqs,
        num_blocks=settings.draft_blocks,
        block_size=size,
        max_model_len=max_model_len,
        max_tokens=2 * settings.max_num_seqs if max_model_len == MAX_MODEL_LEN else 256,
    )
    times = count()
    return ModelProposer(runner, limits, lambda: float(next(times)))


def draft_block_size(settings: Settings) -> int:
    """Return the block size of a draft model or a head, which one process has whole."""
    return settings.block_size if settings.block_size <= MAX_BLOCK_SIZE else 16


def self_proposer(executor: Executor, settings: Settings, max_model_len: int) -> SelfProposer:
    """Return a proposer over the first layers of the target. Their cache is shared later."""
    runner = DraftRunner(
        executor,
        num_slots=settings.max_num_seqs,
        max_model_len=max_model_len,
        block_size=settings.block_size,
        max_samples=settings.max_samples,
    )
    limits = DraftLimits(
        num_slots=settings.max_num_seqs,
        num_blocks=0,
        block_size=settings.block_size,
        max_model_len=max_model_len,
        max_tokens=settings.max_num_seqs,
    )
    times = count()
    return SelfProposer(runner, limits, lambda: float(next(times)))


def draft_source(
    settings: Settings, answer: Answer, model: CostlyProposer | None = None
) -> Drafter | None:
    """Return the source of a case; None for a case without drafts."""
    if not settings.proposer:
        return None
    num_slots = settings.max_num_seqs

    def report(what: str, **fields: Field) -> None:
        raise AssertionError(f"{what}: {fields}")

    control: Control = FixedControl(settings.max_drafts)
    if settings.adaptive:
        control = AdaptiveControl(num_slots, settings.max_drafts)
    proposer: Proposer
    if model is not None:
        proposer = model
    elif settings.proposer in IS_RIGHT:
        proposer = OracleProposer(answer, IS_RIGHT[settings.proposer])
    elif settings.proposer == "history":
        proposer = HistoryProposer(num_slots, 64)
    else:  # ngram, and heads for an executor that hands out no hidden states
        proposer = NgramProposer(num_slots)
    return Drafter(
        proposer,
        PredictionProposer(num_slots),
        control,
        num_slots=num_slots,
        max_drafts=settings.max_drafts,
        vocab_size=VOCAB_SIZE,
        report=report,
    )
