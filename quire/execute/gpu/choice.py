"""Token choice and scores from logits on a device: kernels, and the host for the rows they leave.

The results are those of quire/sampling, bit for bit: kernels choose for all rows, then the host
chooses again for the rows that device_params.rows_for_the_host names, from a copy of their logits.
Knows no programs and no requests. Always holds: nothing waits until the result is asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from quire.base.records import Candidates
from quire.execute.gpu.kernels.choose_tokens import choose_tokens
from quire.execute.gpu.kernels.device_params import DeviceSamplingParams, rows_for_the_host
from quire.execute.gpu.kernels.edit_logits import Edits, add_late_tokens, edit_logits
from quire.execute.gpu.kernels.logprobs import score_listed, score_rows
from quire.execute.gpu.stream import CpuStream, Mark, Stream
from quire.sampling import scoring
from quire.sampling.batch import (
    SampleBatch,
    TokenChoice,
    check_known,
    check_shapes,
    has_mirostat,
    max_top,
)
from quire.sampling.scoring import ScoreBatch, Scores

Keep = Callable[[torch.Tensor], None]
CPU_STREAM = CpuStream()
HostChoice = Callable[[NDArray[np.float32], SampleBatch], TokenChoice]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """A choice queued on the device for R rows; it is copied to the host behind a mark. scores: of
    rows that ask, log-probabilities, best ids and theirs."""

    batch: SampleBatch
    ids: torch.Tensor
    scores: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None
    mark: Mark

    def wait(self) -> TokenChoice:
        """Until it is there."""
        self.mark.wait()
        batch, num_logprobs = self.batch, self.batch.num_logprobs
        mus = np.zeros(len(self.ids) if has_mirostat(batch) else 0, np.float32)
        candidates = _no_candidates(batch)
        if num_logprobs is None or self.scores is None:
            return TokenChoice(token_ids=self.ids.numpy(), mus=mus, candidates=candidates)
        logprobs, top_ids, top_logprobs = (part.numpy() for part in self.scores)
        return TokenChoice(
            token_ids=self.ids.numpy(),
            logprobs=np.where(num_logprobs >= 0, logprobs, np.float32(np.nan)),
            top_ids=top_ids,
            top_logprobs=top_logprobs,
            mus=mus,
            candidates=candidates,
        )


def choose(
    logits: torch.Tensor, batch: SampleBatch, on_host: HostChoice, stream: Stream = CPU_STREAM
) -> TokenChoice:
    """Return a token for each row of logits f32 [R, V], side by side, which are only read."""
    if len(logits) == 0:
        return on_host(np.empty(tuple(logits.shape), np.float32), batch)
    choice = choose_later(logits, batch, stream).wait()
    left = np.flatnonzero(rows_for_the_host(batch))
    if len(left):
        of_left = stream.to_host(logits[stream.to_device(left)])
        stream.mark().wait()
        _put(choice, left, on_host(of_left.numpy(), batch.take(left)))
    return choice


def choose_later(
    logits: torch.Tensor,
    batch: SampleBatch,
    stream: Stream,
    *,
    last: torch.Tensor | None = None,
    keep: Keep | None = None,
) -> Chosen:
    """As `choose`, by kernels alone: rows that are for the host get any token. last: of each slot,
    where histories lack theirs. keep: called with the device's tokens."""
    check_shapes(np.broadcast_to(np.float32(0), tuple(logits.shape)), batch)
    token_ids = torch.empty((len(logits),), dtype=torch.int32, device=logits.device)
    edits, edited = Edits.of(batch, stream.to_device), None
    if edits is not None:
        if last is not None:
            add_late_tokens(edits, last)
        else:
            check_known(batch)
        edited = logits.clone()
        edit_logits(edited, edits)
    choose_tokens(
        logits, DeviceSamplingParams.of(batch, stream.to_device), token_ids, edited=edited
    )
    if keep is not None:
        keep(token_ids)
    scores = None
    if batch.num_logprobs is not None:
        wanted = stream.to_device(np.maximum(batch.num_logprobs, 0))
        num_top = max_top(batch.num_logprobs)
        found = score_rows(logits, token_ids, wanted, max_top=num_top, needs_target=True)
        parts = found.logprobs, found.top_ids, found.top_logprobs
        scores = tuple(stream.to_host(part) for part in parts)
    ids = stream.to_host(token_ids)
    return Chosen(batch=batch, ids=ids, scores=scores, mark=stream.mark())


def score(logits: torch.Tensor, batch: ScoreBatch, stream: Stream = CPU_STREAM) -> Scores:
    """Return scores of logits f32 [R, V], tokens side by side."""
    scoring.check_shapes(np.broadcast_to(np.float32(0), tuple(logits.shape)), batch)

    def moved(values: NDArray[Any]) -> torch.Tensor:
        return stream.to_device(np.array(values, np.int32))

    most = int(batch.num_top.max(initial=0))
    found = score_rows(logits, moved(batch.targets), moved(batch.num_top), max_top=most)
    listed_rows = np.repeat(np.arange(len(logits)), np.diff(batch.listed_starts))
    listed = score_listed(logits, found, moved(listed_rows), moved(batch.listed_ids))
    parts = found.logprobs, found.ranks, found.top_ids, found.top_logprobs, listed
    read = [stream.to_host(part) for part in parts]
    stream.mark().wait()
    logprobs, ranks, top_ids, top_logprobs, listed_logprobs = (part.numpy() for part in read)
    return Scores(
        logprobs=logprobs,
        ranks=ranks,
        top_ids=top_ids,
        top_logprobs=top_logprobs,
        listed_logprobs=listed_logprobs,
    )


def _no_candidates(batch: SampleBatch) -> Candidates | None:
    """Return room for those of beams; None where no row is one."""
    if batch.num_candidates is None:
        return None
    shape = len(batch.num_candidates), int(batch.num_candidates.max())
    return Candidates(
        ids=np.full(shape, -1, np.int32),
        scores=np.full(shape, np.nan, np.float32),
        logprobs=np.full(shape, np.nan, np.float32),
    )


def _put(choice: TokenChoice, rows: NDArray[np.intp], chosen: TokenChoice) -> None:
    choice.token_ids[rows] = chosen.token_ids
    if len(choice.logprobs):
        choice.logprobs[rows] = chosen.logprobs
        width = chosen.top_ids.shape[1]
        choice.top_ids[rows], choice.top_logprobs[rows] = -1, np.nan
        choice.top_ids[rows, :width] = chosen.top_ids
        choice.top_logprobs[rows, :width] = chosen.top_logprobs
    if len(choice.mus) and len(chosen.mus):
        choice.mus[rows] = chosen.mus
    if choice.candidates is not None and chosen.candidates is not None:
        width = chosen.candidates.ids.shape[1]
        choice.candidates.ids[rows, :width] = chosen.candidates.ids
        choice.candidates.scores[rows, :width] = chosen.candidates.scores
        choice.candidates.logprobs[rows, :width] = chosen.candidates.logprobs
