"""An Executor that computes nothing: it records its input and returns scripted output."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from quire.base.records import Candidates
from quire.program.batch import ForwardBatch
from quire.sampling.batch import SampleBatch, TokenChoice
from quire.sampling.scoring import FAILED, ScoreBatch, Scores

VOCAB_SIZE = 50
FAILS = 44  # a prompt's token that fails its row when scored


def next_ids(positions: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return the scripted choice, which depends on the position only."""
    return (positions % VOCAB_SIZE).astype(np.int32)


class ScriptedExecutor:
    """`choose` gives token ids for the positions of a SampleBatch; -1 fails the row."""

    name = "scripted"
    recipe = "none"
    weights_digest = "none"
    coarse_rows: Mapping[str, int] = MappingProxyType({})

    def __init__(self, choose: Callable[[NDArray[np.int32]], NDArray[np.int32]] = next_ids) -> None:
        self.batches: list[ForwardBatch] = []
        self.heads: list[tuple[int, int]] = []
        self.samples: list[SampleBatch] = []
        self.scored: list[ScoreBatch] = []
        self.copies: list[tuple[list[int], list[int]]] = []
        self.fail_next_trunk: Exception | None = None
        self.is_closed = False
        self._choose = choose

    def allocate_cache(self, num_blocks: int, block_size: int) -> None:
        pass

    def copy_blocks(self, copy_from: NDArray[np.int32], copy_to: NDArray[np.int32]) -> None:
        self.copies.append((copy_from.tolist(), copy_to.tolist()))

    def run_trunk(self, batch: ForwardBatch, *, head_rows: int = 0) -> None:
        error, self.fail_next_trunk = self.fail_next_trunk, None
        if error is not None:
            raise error
        self.batches.append(batch)

    def run_head(self, batch: ForwardBatch, first: int, count: int) -> NDArray[np.float32]:
        self.heads.append((first, count))
        return np.zeros((count, VOCAB_SIZE), np.float32)

    def sample(self, logits: NDArray[np.float32], batch: SampleBatch) -> TokenChoice:
        self.samples.append(batch)
        token_ids, candidates = self._choose(batch.positions), _candidates(batch)
        if batch.num_logprobs is None:
            return TokenChoice(token_ids=token_ids, candidates=candidates)
        num_rows, width = len(batch.positions), max(int(batch.num_logprobs.max()), 0)
        return TokenChoice(
            token_ids=token_ids,
            logprobs=np.where(batch.num_logprobs >= 0, -1.0, np.nan).astype(np.float32),
            top_ids=np.full((num_rows, width), 9, np.int32),
            top_logprobs=np.full((num_rows, width), -2.0, np.float32),
            candidates=candidates,
        )

    def score(self, logits: NDArray[np.float32], batch: ScoreBatch) -> Scores:
        """Return scores with rank and logprob from the target's id; FAILS is no distribution."""
        self.scored.append(batch)
        scores = Scores.empty(batch)
        scores.logprobs[:] = -batch.targets
        scores.ranks[:] = np.where(batch.targets == FAILS, FAILED, batch.targets)
        scores.top_ids[:] = np.where(
            np.arange(scores.top_ids.shape[1]) < batch.num_top[:, None], batch.targets[:, None], -1
        )
        scores.listed_logprobs[:] = -batch.listed_ids
        return scores

    def close(self) -> None:
        self.is_closed = True


def _candidates(batch: SampleBatch) -> Candidates | None:
    """Beams may go on with the first ids."""
    if batch.num_candidates is None:
        return None
    places = np.arange(batch.num_candidates.max(), dtype=np.int32)
    ids = np.where(places < batch.num_candidates[:, None], places, np.int32(-1))
    scores = np.where(ids < 0, np.nan, -ids).astype(np.float32)
    return Candidates(ids=ids, scores=scores, logprobs=scores)
