"""Workloads: the requests, their lengths, and how many may run at once.

Lengths are fixed by the workload's own seed; tokens are drawn anew for each repetition, so that the
prefix cache hits only what a workload shares on purpose. Independent of engine and clock.
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
# Default lengths.
PROMPTS, OUTPUTS = (128, 512), (32, 128)
# Ids below are letters and special tokens in most vocabularies.
FIRST_TOKEN_ID = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSpec:
    """One request: prompt ids, exactly `output_tokens` of output, sent `arrival_s` after start."""

    prompt_ids: tuple[int, ...]
    output_tokens: int
    arrival_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Prompt and output tokens of one request; its first `shared` tokens are common to all."""

    prompt: int
    output: int
    shared: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Requests that are submitted together, of which at most `max_running` run at once."""

    name: str
    text: str
    lengths: tuple[Lengths, ...]
    max_running: int

    @property
    def prompt_tokens(self) -> int:
        """Return the prompt tokens of all requests."""
        return sum(one.prompt for one in self.lengths)

    @property
    def output_tokens(self) -> int:
        """Return the output tokens of all requests."""
        return sum(one.output for one in self.lengths)

    @property
    def longest(self) -> int:
        """Return the tokens of the longest request, prompt and output."""
        return max(one.prompt + one.output for one in self.lengths)

    def draw(self, vocab_size: int, rng: np.random.Generator) -> list[RequestSpec]:
        """Return the requests with new tokens. Raises SettingError for a tiny vocabulary."""
        shared = draw_ids(max(one.shared for one in self.lengths), vocab_size, rng)
        return [
            RequestSpec(
                prompt_ids=(
                    *shared[: one.shared].tolist(),
                    *draw_ids(one.prompt - one.shared, vocab_size, rng).tolist(),
                ),
                output_tokens=one.output,
            )
            for one in self.lengths
        ]


def draw_ids(count: int, vocab_size: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Draw token ids [count], uniform over the vocabulary without its first few (if large)."""
    first = FIRST_TOKEN_ID if vocab_size > 2 * FIRST_TOKEN_ID else 3
    if vocab_size <= first:
        raise SettingError(f"the vocabulary has {vocab_size} tokens; more than {first} are needed")
    return rng.integers(first, vocab_size, count)


def mixed_lengths(
    num_requests: int, prompts: tuple[int, int], outputs: tuple[int, int], *, seed: int
) -> tuple[Lengths, ...]:
    """Draw lengths uniformly within both ranges, ends included, fixed by `seed`."""
    rng = np.random.default_rng(seed)
    return tuple(
        Lengths(prompt=int(prompt), output=int(output))
        for prompt, output in zip(
            rng.integers(prompts[0], prompts[1] + 1, num_requests),
            rng.integers(outputs[0], outputs[1] + 1, num_requests),
            strict=True,
        )
    )


def fit_lengths(
    context: int | None, prompts: Range | None, outputs: Range | None
) -> tuple[Range, Range]:
    """Return lengths of prompts and outputs: the given ones, else defaults cut to the context.

    A context of None is unknown. Raises SettingError where given lengths do not fit.
    """
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


def batches(specs: Sequence[RequestSpec], size: int) -> list[list[RequestSpec]]:
    """Yield static batches: groups in order, each computed until its longest answer is complete.

    All of a group request the longest output among them; the caller ignores tokens beyond a
    request's own length.
    """
    groups = []
    for first in range(0, len(specs), size):
        group = specs[first : first + size]
        longest = max(spec.output_tokens for spec in group)
        groups.append(
            [RequestSpec(prompt_ids=one.prompt_ids, output_tokens=longest) for one in group]
        )
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
