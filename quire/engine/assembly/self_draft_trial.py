"""What some numbers of a model's first layers would draft, measured before the first request.

The model writes a few short texts, and each candidate guesses every token of them with the noise
that the model had. Their keys and values are those of the model, so that a guess at a position is
exactly the draft that would be made there. Runs in KV blocks that nothing is stored in yet. Always
holds: it ends after about MAX_MS, or measures nothing where that is too short.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from quire.base.sampling_params import SamplingParams
from quire.engine.assembly.sized_proposer import LoadedModel, made_up_request
from quire.execute.executor import Executor
from quire.runner.draft_runner import DraftRunner
from quire.speculative.layer_choice import MeasuredLayers, StepTimes

Int32s = NDArray[np.int32]
MAX_TEXTS, MAX_TOKENS, MIN_TOKENS = 16, 24, 4
MAX_MS = 5_000.0
TEMPERATURE = 0.7
# Passes of one request that are timed; the fastest counts.
_ROUNDS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """measured: of each candidate. ms: what it took."""

    measured: tuple[MeasuredLayers, ...]
    times: StepTimes
    num_tokens: int
    ms: float


def tried(
    model: LoadedModel,
    shares: Mapping[int, float],
    first_layers: Callable[[int], Executor],
    *,
    first_id: int,
    max_samples: int,
) -> Trial | None:
    """Measure candidates; None where the machine is too slow for it, or the context too short.

    shares: of the layers that a pass computes, by their number. first_layers: makes an executor of
    so many. first_id: the token that texts begin with.
    """
    began_ms, memory = model.clock.now_ms(), model.memory
    longest = min(MAX_TOKENS, memory.max_model_len - 1, memory.num_blocks * memory.block_size)
    if longest < MIN_TOKENS:
        return None
    blocks_of_text = -(-longest // memory.block_size)
    num_texts = min(MAX_TEXTS, model.limits.max_num_seqs, memory.num_blocks // blocks_of_text)

    def passes_of(executor: Executor) -> _Passes:
        runner = DraftRunner(
            executor,
            num_slots=num_texts,
            max_model_len=longest + 1,
            block_size=memory.block_size,
            max_samples=max_samples,
        )
        blocks = np.arange(num_texts * blocks_of_text, dtype=np.int32).reshape(num_texts, -1)
        return _Passes(runner, blocks, first_id, model.clock.now_ms)

    whole = passes_of(model.executor)
    step_ms = whole.one_ms()
    whole.compute(0)
    nums, affordable = _affordable(shares, whole.best_ms)
    num_tokens = min(longest, affordable)
    if not nums:
        whole.runner.leave()
        return None
    for position in range(num_tokens):
        whole.write(position, whole.compute(position))
    texts = whole.runner.tokens.tokens[:, : num_tokens + 1].copy()
    row_ms = max(whole.best_ms - step_ms, 0.0) / max(num_texts - 1, 1)
    whole.runner.leave()
    measured = []
    for num in nums:
        short = passes_of(first_layers(num))
        pass_ms = short.one_ms()
        agrees = np.zeros((num_texts, num_tokens), np.bool_)
        for position in range(num_tokens):
            agrees[:, position] = short.compute(position) == texts[:, position + 1]
            short.write(position, texts[:, position + 1])
        short.runner.close()
        measured.append(MeasuredLayers(num=num, pass_ms=pass_ms, agrees=agrees))
    return Trial(
        measured=tuple(measured),
        times=StepTimes(step_ms=step_ms, row_ms=row_ms),
        num_tokens=num_texts * num_tokens,
        ms=model.clock.now_ms() - began_ms,
    )


def _affordable(shares: Mapping[int, float], step_ms: float) -> tuple[list[int], int]:
    """Return the candidates and the tokens of a text for which there is time, those with the most
    layers left out first; no candidates where there is too little. step_ms: of all texts."""
    nums = sorted(shares)
    while nums:
        token_ms = step_ms * (1.0 + sum(shares[num] for num in nums))
        num_tokens = int(min(MAX_MS / max(token_ms, 1e-9), MAX_TOKENS))
        if num_tokens >= MIN_TOKENS:
            return nums, num_tokens
        nums.pop()
    return [], 0


class _Passes:
    """Passes over texts that begin with `first_id`, one in each slot. blocks: of each text."""

    def __init__(
        self, runner: DraftRunner, blocks: Int32s, first_id: int, now_ms: Callable[[], float]
    ) -> None:
        self.runner, self._now_ms, self.best_ms = runner, now_ms, np.inf
        self._slots = np.arange(len(blocks))
        for slot in self._slots.tolist():
            sampling = SamplingParams(seed=slot, temperature=TEMPERATURE)
            runner.admit(slot, replace(made_up_request(), sampling=sampling), 1)
            runner.set_blocks(slot, 0, blocks[slot])
        self.write(-1, np.full(len(blocks), first_id, np.int32))

    def write(self, position: int, token_ids: Int32s) -> None:
        """Put the tokens after `position`; a row that failed goes on with the first token id."""
        positions = np.full(len(self._slots), position + 1, np.int32)
        self.runner.tokens.put(self._slots, positions, np.maximum(token_ids, 0))

    def compute(self, position: int) -> Int32s:
        """Compute the token of each text at `position`, and return what follows it."""
        return self._pass(self._slots, position)

    def one_ms(self) -> float:
        """Return the time of a pass of one text."""
        for _ in range(_ROUNDS):
            self._pass(self._slots[:1], 0)
        one_ms, self.best_ms = self.best_ms, np.inf
        return float(one_ms)

    def _pass(self, slots: NDArray[np.intp], position: int) -> Int32s:
        starts, ones = np.full(len(slots), position, np.int32), np.ones(len(slots), np.int32)
        began_ms = self._now_ms()
        sampled = self.runner.compute(slots, starts, ones, ones > 0)
        self.best_ms = min(self.best_ms, self._now_ms() - began_ms)
        return sampled
