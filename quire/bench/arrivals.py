"""Arrival times and lengths of requests: a Poisson process, or a replayed trace.

Content is made up. Lengths and shared prompt blocks are the trace's, so a replay meets the prefix
cache as the recorded service did.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from quire.base.errors import SettingError
from quire.bench.workloads import Lengths, RequestSpec, draw_ids
from quire.obs.trace import Arrival


def poisson(
    lengths: Sequence[Lengths],
    *,
    per_s: float,
    seconds: float,
    vocab_size: int,
    rng: np.random.Generator,
) -> list[RequestSpec]:
    """Draw the arrivals of a Poisson process within `seconds`.

    The number of requests is the expected one (at least one), so that higher rates always mean more
    requests. Lengths are taken in turn. Raises SettingError for a rate of 0 or less.
    """
    if not per_s > 0 or not seconds > 0:
        raise SettingError(f"{per_s} requests a second for {seconds} s; both must be above 0")
    specs: list[RequestSpec] = []
    for arrival_s in np.sort(rng.uniform(0.0, seconds, max(round(per_s * seconds), 1))).tolist():
        one = lengths[len(specs) % len(lengths)]
        ids = draw_ids(one.prompt, vocab_size, rng)
        specs.append(
            RequestSpec(
                prompt_ids=tuple(ids.tolist()), output_tokens=one.output, arrival_s=arrival_s
            )
        )
    return specs


def replay(
    trace: Sequence[Arrival],
    *,
    speed: float,
    max_tokens: int,
    vocab_size: int,
    rng: np.random.Generator,
) -> tuple[list[RequestSpec], int]:
    """Return the trace's requests, `speed` times as fast, and how many were left out.

    A request of more than `max_tokens`, prompt and output, does not fit the model and is left out.
    Raises SettingError where none is left.
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
    specs = []
    for one in fit:
        ids: list[int] = []
        for block_id in one.block_ids:
            if block_id not in blocks:
                drawn = draw_ids(one.block_tokens, vocab_size, rng)
                blocks[block_id] = tuple(drawn.tolist())
            ids += blocks[block_id]
        if len(ids) < one.prompt_tokens:
            ids += draw_ids(one.prompt_tokens - len(ids), vocab_size, rng).tolist()
        specs.append(
            RequestSpec(
                prompt_ids=tuple(ids[: one.prompt_tokens]),
                output_tokens=one.output_tokens,
                arrival_s=one.arrival_s / speed,
            )
        )
    return specs, len(trace) - len(fit)
