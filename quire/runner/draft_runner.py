"""DraftRunner: computes the draft model of speculative decoding, by slot.

It has the tables and the steps of the target's runner, over an executor of its own. Drafts are
sampled with the parameters of their request, and with the noise of the target: at the same
position of the same stream both models add the same values to their logits, so they choose the same
token more often than two independent samples would. Grammars are left out; a draft ends at the
first token that its request's grammar forbids. Knows no proposer and no policy.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from quire.base.records import NO_INTS, Admission, Request, StepPlan
from quire.base.token_table import TokenTable
from quire.execute.executor import Executor
from quire.runner.batch_builder import KeptRows, KeptSampleBatch
from quire.runner.slot_tables import SlotTables
from quire.runner.step_run import RunnerResources, StepRun

Index = NDArray[np.intp]
Int32s = NDArray[np.int32]
Bools = NDArray[np.bool_]
# Changes the seeds where drafts are sampled with noise of their own.
OTHER_NOISE = 0x5EED


class DraftRunner:
    """A DraftModel (quire/speculative/draft_model.py) over `executor`, with its cache allocated.

    max_samples: rows of a slice of the head. shares_noise: False: independent of the target's, for
    comparison.
    """

    def __init__(
        self,
        executor: Executor,
        *,
        num_slots: int,
        max_model_len: int,
        block_size: int,
        max_samples: int,
        shares_noise: bool = True,
    ) -> None:
        self._tables = SlotTables(
            num_slots=num_slots,
            max_model_len=max_model_len,
            block_size=block_size,
            jump_ahead=False,
        )
        self._resources = RunnerResources(
            executor=executor,
            tables=self._tables,
            rows=KeptRows(self._tables),
            sampling=KeptSampleBatch(self._tables),
            max_samples=max_samples,
        )
        self._seed_change = 0 if shares_noise else OTHER_NOISE
        self._num_passes = 0

    @property
    def tokens(self) -> TokenTable:
        """Return the known tokens and drafts, by slot."""
        return self._tables.tokens

    def admit(self, slot: int, request: Request, num_prompt_tokens: int) -> None:
        """Take over the sampling parameters of `request`."""
        admission = draft_admission(slot, request, num_prompt_tokens, self._seed_change)
        self._tables.apply(self._plan(admissions=(admission,)))

    def retire(self, slot: int) -> None:
        """Forget the request in `slot`."""
        self._tables.apply(self._plan(retired=np.array([slot], np.int32)))

    def set_blocks(self, slot: int, first: int, blocks: Int32s) -> None:
        """Set entries of the block table of `slot`, from column `first` on."""
        self._tables.blocks[slot, first : first + len(blocks)] = blocks

    def compute(self, slots: Index, starts: Int32s, counts: Int32s, samples: Bools) -> Int32s:
        """Compute one pass; see DraftModel."""
        plan = self._plan(
            slots=slots.astype(np.int32),
            starts=starts,
            counts=counts,
            store_from=starts,
            sample_counts=samples.astype(np.int32),
        )
        run = StepRun(plan, self._resources)
        run.begin()
        run.choose()
        sampled = np.full(len(slots), -1, np.int32)
        sampled[samples] = run.computed().choice.token_ids
        return sampled

    def close(self) -> None:
        """Close the executor."""
        self.leave()
        self._resources.executor.close()

    def leave(self) -> None:
        """Close all but the executor, which another owns."""
        self._tables.grammars.close()

    def _plan(self, **parts: object) -> StepPlan:
        self._num_passes += 1
        return StepPlan(step=self._num_passes, **parts)  # type: ignore[arg-type]


def draft_admission(
    slot: int, request: Request, num_prompt_tokens: int, seed_change: int = 0
) -> Admission:
    """Return what tables that drafts are sampled with take over of a request, without tokens."""
    sampling = request.sampling
    assert sampling.seed is not None, "parameters are resolved"
    return Admission(
        slot=slot,
        request_id=request.request_id,
        stream=request.stream,
        token_ids=NO_INTS,
        num_prompt_tokens=num_prompt_tokens,
        stop_ids=request.stop_ids,
        sampling=replace(
            sampling,
            seed=sampling.seed ^ seed_change,
            structured_outputs=None,
            logprobs=None,
            prompt_logprobs=None,
            logprob_token_ids=(),
        ),
        rules=request.rules,
    )
