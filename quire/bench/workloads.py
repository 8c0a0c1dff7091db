"""Workloads: which requests are sent, how long they are, and how many may run at once.

Lengths are fixed by the workload's own seed and never change; tokens are drawn anew for each
repetition, so that no prefix cache holds them, but for what a workload shares on purpose. Knows
no engine and no clock.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from quire.base.errors import SettingError

Range = tuple[int, int]
# The usual lengths, where nobody asks for others.
PROMPTS, OUTPUTS = (128, 512), (32, 128)
# Ids below are letters and special tokens in most vocabularies.
FIRST_TOKEN_ID = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request: token ids in, exactly `output_tokens` out, sent `arrival_s` after the start."""

    prompt_ids: tuple[int, ...]
    output_tokens: int
    arrival_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Prompt and output tokens of one request; the first `shared` of the prompt are everybody's."""

    prompt: int
    output: int
    shared: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Requests that are handed in together, of which at most `max_running` may run at once."""

    name: str
    text: str
    lengths: tuple[Lengths, ...]
    max_running: int

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens of all requests."""
        return sum(one.prompt for one in self.lengths)

    @property
    def output_tokens(self) -> int:
        """Output tokens of all requests."""
        return sum(one.output for one in self.lengths)

    @property
    def longest(self) -> int:
        """Tokens of the longest request, prompt and output."""
        return max(one.prompt + one.output for one in self.lengths)

    def draw(self, vocab_size: int, rng: np.random.Generator) -> list[Ask]:
        """The requests with fresh tokens. Raises SettingError for a vocabulary that is tiny."""
        shared = draw_ids(max(one.shared for one in self.lengths), vocab_size, rng)
        return [
            Ask(
                prompt_ids=(
                    *shared[: one.shared].tolist(),
                    *draw_ids(one.prompt - one.shared, vocab_size, rng).tolist(),
                ),
                output_tokens=one.output,
            )
            for one in self.lengths
        ]


def draw_ids(count: int, vocab_size: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Token ids [count], even over the vocabulary but for its first few where it is large."""
    first = FIRST_TOKEN_ID if vocab_size > 2 * FIRST_TOKEN_ID else 3
    if vocab_size <= first:
        raise SettingError(f"the vocabulary has {vocab_size} tokens; more than {first} are needed")
    return rng.integers(first, vocab_size, count)


def mixed_lengths(
    num_requests: int, prompts: tuple[int, int], outputs: tuple[int, int], *, seed: int
) -> tuple[Lengths, ...]:
    """Lengths even within both ranges, ends included, fixed by `seed`."""
    rng = np.random.default_rng(seed)
    return tuple(
        Lengths(prompt=int(prompt), output=int(output))
        for prompt, output in zip(
            rng.integers(prompts[0], prompts[1] + 1, num_requests),
            rng.integers(outputs[0], outputs[1] + 1, num_requests),
            strict=True,
        )
    )


def fitted(
    context: int | None, prompts: Range | None, outputs: Range | None
) -> tuple[Range, Range]:
    """Lengths of prompts and outputs: what was asked for, else the usual ones, cut to a context of
    so many tokens (None: not known). Raises SettingError where what was asked for does not fit."""
    room = math.inf if context is None else context
    least = (prompts[1] if prompts else 1) + (outputs[1] if outputs else 1)
    if least > room:
        raise SettingError(
            f"--prompts up to {prompts[1] if prompts else 1} and --outputs up to "
            f"{outputs[1] if outputs else 1} are {least} tokens; this model holds {room}: lower "
            "them, or serve it with a larger --max-model-len"
        )
    if prompts is None and outputs is None:
        share = min(room / (PROMPTS[1] + OUTPUTS[1]), 1.0)
        return _shorter(PROMPTS, share), _shorter(OUTPUTS, share)
    if prompts is None:
        assert outputs is not None
        return _shorter(PROMPTS, min((room - outputs[1]) / PROMPTS[1], 1.0)), outputs
    if outputs is None:
        return prompts, _shorter(OUTPUTS, min((room - prompts[1]) / OUTPUTS[1], 1.0))
    return prompts, outputs


def _shorter(lengths: Range, share: float) -> Range:
    return max(int(lengths[0] * share), 1), max(int(lengths[1] * share), 1)


def batches(asks: Sequence[Ask], size: int) -> list[list[Ask]]:
    """Static batching: groups in order, each computed until its longest answer is done.

    So all of a group ask for the longest output among them; what is beyond their own is not
    counted by whoever measures.
    """
    groups = []
    for first in range(0, len(asks), size):
        group = asks[first : first + size]
        longest = max(ask.output_tokens for ask in group)
        groups.append([Ask(prompt_ids=one.prompt_ids, output_tokens=longest) for one in group])
    return groups


WORKLOADS: Mapping[str, Workload] = MappingProxyType(
    {
        "w1": Workload(
            name="w1",
            text="one request, 128 tokens in, 128 out",
            lengths=(Lengths(prompt=128, output=128),),
            max_running=1,
        ),
        "w2": Workload(
            name="w2",
            text="one request, 2,048 tokens in, one out",
            lengths=(Lengths(prompt=2048, output=1),),
            max_running=1,
        ),
        "w3": Workload(
            name="w3",
            text="32 requests at once, 128-512 tokens in, 32-128 out, at most 16 running",
            lengths=mixed_lengths(32, (128, 512), (32, 128), seed=2920),
            max_running=16,
        ),
        "w4": Workload(
            name="w4",
            text="16 requests at once, 1,024 shared tokens and 32 own in, 32 out",
            lengths=(Lengths(prompt=1056, output=32, shared=1024),) * 16,
            max_running=16,
        ),
    }
)
