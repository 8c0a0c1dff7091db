"""A naive beam search: every continuation of every beam is made, sorted and judged.

Written from the description of `transformers`' search, for comparison. Independent of blocks, plans
and the number of log-probabilities needed. A log-probability of -inf is a ban.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Wishes:
    """Parameters of a search; transformers calls width num_beams.

    ends: whether the answer of these tokens is complete, by its grammar or its text.
    """

    width: int
    max_new: int
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    stop_ids: Collection[int] = ()
    min_new: int = 0
    ends: Callable[[tuple[int, ...]], bool] = lambda tokens: False


Sequence = tuple[float, tuple[int, ...]]


def beams(
    logprobs_after: Callable[[tuple[int, ...]], list[float]], wishes: Wishes
) -> list[Sequence]:
    """Return the finished sequences, (score, new tokens), best first."""
    running: list[Sequence] = [(0.0, ())]
    finished: list[Sequence] = []
    for length in range(1, wishes.max_new + 1):
        everything: list[Sequence] = []
        for total, tokens in running:
            for token_id, logprob in enumerate(logprobs_after(tokens)):
                if token_id in wishes.stop_ids and length <= wishes.min_new:
                    continue
                if logprob > -math.inf:
                    everything.append((total + logprob, (*tokens, token_id)))
        everything.sort(key=lambda one: -one[0])
        everything = _looked_at(everything, wishes)
        ends = [_is_end(one[1], wishes) for one in everything]
        for one, is_end in list(zip(everything, ends, strict=True))[: wishes.width]:
            if is_end:
                finished.append((one[0] / length**wishes.length_penalty, one[1]))
        finished = sorted(finished, key=lambda one: -one[0])[: wishes.width]
        running = [one for one, is_end in zip(everything, ends, strict=True) if not is_end]
        running = running[: wishes.width]
        if not running or _stops(running, finished, length, wishes):
            break
    return finished


def _is_end(tokens: tuple[int, ...], wishes: Wishes) -> bool:
    by_token = tokens[-1] in wishes.stop_ids or len(tokens) == wishes.max_new
    return by_token or wishes.ends(tokens)


def _looked_at(everything: list[Sequence], wishes: Wishes) -> list[Sequence]:
    """Return up to twice `width` candidates that no token ends, and what precedes them."""
    others = 0
    for place, one in enumerate(everything):
        others += one[1][-1] not in wishes.stop_ids
        if others == 2 * wishes.width:
            return everything[: place + 1]
    return everything


def _stops(running: list[Sequence], finished: list[Sequence], length: int, wishes: Wishes) -> bool:
    if len(finished) < wishes.width:
        return False
    if wishes.early_stopping is True:
        return True
    hoped_for = length
    if wishes.early_stopping == "never" and wishes.length_penalty > 0:
        hoped_for = wishes.max_new
    return running[0][0] / hoped_for**wishes.length_penalty <= finished[-1][0]
