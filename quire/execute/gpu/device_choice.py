"""Token choice and scores where the logits are, by kernels; only a few numbers a row come back.

Rows that ask for what the kernels do not do (kernels/wishes.py names it) are chosen on the host,
and with them their whole step: their logits have to be read anyway. Knows no program. Always
holds: the same tokens as quire/sampling/reference.py.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from quire.execute.gpu.kernels.choose_tokens import choose_tokens
from quire.execute.gpu.kernels.edit_logits import Edits, edit_logits
from quire.execute.gpu.kernels.logprobs import score_listed, score_rows
from quire.execute.gpu.kernels.wishes import Wishes, rows_for_the_host
from quire.sampling.batch import SampleBatch, TokenChoice
from quire.sampling.scoring import ScoreBatch, Scores


def is_for_the_host(batch: SampleBatch) -> bool:
    """Does a row ask for what no kernel does?"""
    return bool(rows_for_the_host(batch).any())


def choose_on_device(logits: Tensor, batch: SampleBatch) -> TokenChoice:
    """A token for each row of logits f32 [R, V]."""
    logits, device = logits.contiguous(), logits.device
    token_ids = torch.empty(len(logits), dtype=torch.int32, device=device)
    edits, edited = Edits.of(batch, device), None
    if edits is not None:
        edited = logits.clone()
        edit_logits(edited, edits)
    choose_tokens(logits, Wishes.of(batch, device), token_ids, edited=edited)
    wanted = batch.num_logprobs
    if wanted.max(initial=-1) < 0:
        return TokenChoice(
            token_ids=token_ids.cpu().numpy(),
            logprobs=np.full(len(logits), np.nan, np.float32),
            top_ids=np.empty((len(logits), 0), np.int32),
            top_logprobs=np.empty((len(logits), 0), np.float32),
        )
    most_top = max(int(wanted.max()), 0)
    num_top = torch.from_numpy(np.maximum(wanted, 0).astype(np.int32)).to(device)
    is_wanted = torch.from_numpy(wanted >= 0).to(device)
    found = score_rows(
        logits, torch.where(is_wanted, token_ids, -1).int(), num_top, most_top=most_top
    )
    chosen = token_ids.cpu().numpy()
    top_ids, top_logprobs = found.top_ids.cpu().numpy(), found.top_logprobs.cpu().numpy()
    failed = chosen < 0  # such a row tells nothing
    top_ids[failed], top_logprobs[failed] = -1, np.nan
    return TokenChoice(
        token_ids=chosen,
        logprobs=found.logprobs.cpu().numpy(),
        top_ids=top_ids,
        top_logprobs=top_logprobs,
    )


def score_on_device(logits: Tensor, batch: ScoreBatch) -> Scores:
    """How likely known tokens are, by logits f32 [R, V]."""
    logits, device = logits.contiguous(), logits.device
    targets, num_top = (
        torch.from_numpy(np.ascontiguousarray(values, np.int32)).to(device)
        for values in (batch.targets, batch.num_top)
    )
    found = score_rows(logits, targets, num_top, most_top=int(batch.num_top.max(initial=0)))
    rows = np.repeat(np.arange(len(batch.targets)), np.diff(batch.listed_starts))
    listed = score_listed(
        logits,
        found,
        torch.from_numpy(rows.astype(np.int32)).to(device),
        torch.from_numpy(np.ascontiguousarray(batch.listed_ids, np.int32)).to(device),
    )
    return Scores(
        logprobs=found.logprobs.cpu().numpy(),
        ranks=found.ranks.cpu().numpy(),
        top_ids=found.top_ids.cpu().numpy(),
        top_logprobs=found.top_logprobs.cpu().numpy(),
        listed_logprobs=listed.cpu().numpy(),
    )
