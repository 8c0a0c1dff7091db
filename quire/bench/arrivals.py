"""When requests arrive and how long they are: Poisson at a rate, or a recorded trace replayed.

Content is made up; lengths, and which blocks of tokens prompts share, are the trace's: replaying
it meets the prefix cache as the recorded service's did.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from quire.base.errors import SettingError
from quire.bench.workloads import Ask, Lengths, draw_ids
from quire.obs.trace import MOONCAKE_BLOCK_TOKENS, Arrival


def poisson(
    lengths: Sequence[Lengths],
    *,
    per_s: float,
    seconds: float,
    vocab_size: int,
    rng: np.random.Generator,
) -> list[Ask]:
    """Requests that arrive independently within `seconds`: a Poisson process, given that as many
    came as `per_s` makes (at least one), so that rising rates do rise.

    Lengths are taken in turn. Raises SettingError for a rate of 0 or less.
    """
    if not per_s > 0 or not seconds > 0:
        raise SettingError(f"{per_s} requests a second for {seconds} s; both must be above 0")
    asks: list[Ask] = []
    for arrival_s in np.sort(rng.uniform(0.0, seconds, max(round(per_s * seconds), 1))).tolist():
        one = lengths[len(asks) % len(lengths)]
        ids = draw_ids(one.prompt, vocab_size, rng)
        asks.append(
            Ask(prompt_ids=tuple(ids.tolist()), output_tokens=one.output, arrival_s=arrival_s)
        )
    return asks


def replay(
    trace: Sequence[Arrival],
    *,
    speed: float,
    max_tokens: int,
    vocab_size: int,
    rng: np.random.Generator,
) -> tuple[list[Ask], int]:
    """The trace's requests, `speed` times as fast, and how many were left out.

    A request of more than `max_tokens`, prompt and output, is left out: the model could not hold
    it. Raises SettingError where that leaves none.
    """
    if not speed > 0:
        raise SettingError(f"the speed is {speed}; it must be above 0")
    fit = [one for one in trace if one.prompt_tokens + one.output_tokens <= max_tokens]
    if not fit:
        raise SettingError(
            f"none of the {len(trace)} requests of the trace has at most {max_tokens} tokens; "
            "raise --max-tokens as far as the model's context allows"
        )
    blocks: dict[int, tuple[int, ...]] = {}
    asks = []
    for one in fit:
        ids: list[int] = []
        for block_id in one.block_ids:
            if block_id not in blocks:
                drawn = draw_ids(MOONCAKE_BLOCK_TOKENS, vocab_size, rng)
                blocks[block_id] = tuple(drawn.tolist())
            ids += blocks[block_id]
        if len(ids) < one.prompt_tokens:
            ids += draw_ids(one.prompt_tokens - len(ids), vocab_size, rng).tolist()
        asks.append(
            Ask(
                prompt_ids=tuple(ids[: one.prompt_tokens]),
                output_tokens=one.output_tokens,
                arrival_s=one.arrival_s / speed,
            )
        )
    return asks, len(trace) - len(fit)
