"""The first layers of an engine's model as its draft model (--speculate self), loaded and timed.

They share the packed weights and the KV cache of the model's executor. With several plans in flight
the model computes in another thread meanwhile, so that drafts get threads of their own; the two
store in different blocks. Drafting by itself takes part in no fingerprint: it changes no answer.
"""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import numpy as np

from quire.base.clock import Clock
from quire.base.token_table import TokenTable
from quire.config.memory import MemoryPlan
from quire.engine.assembly.draft_model import made_up_request
from quire.engine.assembly.self_draft_size import SizedSelfDraft
from quire.execute.executor import Executor
from quire.runner.draft_runner import DraftRunner
from quire.scheduler.limits import SchedulerLimits
from quire.speculative.draft_model import DraftLimits
from quire.speculative.proposer import no_drafts
from quire.speculative.self_draft import SelfProposer

# Rounds of passes that are timed before the first request, and drafts of each.
_ROUNDS = 3
_DRAFTS = 3


def load_self_draft(
    draft: SizedSelfDraft,
    model: Executor,
    *,
    memory: MemoryPlan,
    block_size: int,
    limits: SchedulerLimits,
    num_threads: int,
    clock: Clock,
) -> SelfProposer:
    """Return the proposer over the first layers of `model`, which has its cache.

    num_threads: of passes beside the model's steps.
    """
    program = replace(draft.program, max_positions=memory.max_model_len)
    own_threads = num_threads if limits.plans_in_flight > 1 else 0
    runner = DraftRunner(
        _first_layers_of(model, replace(draft, program=program), own_threads),
        num_slots=limits.max_num_seqs,
        max_model_len=memory.max_model_len,
        block_size=block_size,
        max_samples=draft.limits.max_samples,
    )
    sizes = DraftLimits(
        num_slots=limits.max_num_seqs,
        num_blocks=0,
        block_size=block_size,
        max_model_len=memory.max_model_len,
        max_tokens=draft.limits.max_tokens,
    )
    proposer = SelfProposer(runner, sizes, clock.now_ms)
    _time_passes(proposer, limits.max_num_seqs, memory.num_blocks, block_size)
    return proposer


def _first_layers_of(model: Executor, draft: SizedSelfDraft, num_threads: int) -> Executor:
    """Return an executor of the first layers. num_threads: of its own; 0: the model's."""
    if model.name == "native":
        from quire.execute.native import NativeExecutor
        from quire.execute.native_first_layers import NativeFirstLayers

        native = cast(NativeExecutor, model)
        short = NativeFirstLayers(native, draft.program, draft.limits, num_threads=num_threads)
        short.share_cache()
        return short
    if model.name == "torch":
        from quire.execute.gpu.executor import TorchExecutor
        from quire.execute.gpu.first_layers import TorchFirstLayers

        on_device = TorchFirstLayers(cast(TorchExecutor, model), draft.program, draft.limits)
        on_device.share_cache()
        return on_device
    from quire.execute.reference import ReferenceExecutor
    from quire.execute.reference_first_layers import ReferenceFirstLayers

    twin = ReferenceFirstLayers(cast(ReferenceExecutor, model), draft.program, draft.limits)
    twin.share_cache()
    return twin


def _time_passes(proposer: SelfProposer, num_slots: int, num_blocks: int, block_size: int) -> None:
    """Time passes of one request and of all, in blocks that nothing is stored in yet."""
    known = TokenTable(num_slots, 2)
    for num in sorted({1, num_slots}):
        slots, limits = np.arange(num), np.full(num, _DRAFTS, np.int32)
        blocks = (slots[:, None] % num_blocks).astype(np.int32)
        for slot in range(num):
            known.admit(slot, np.zeros(2, np.int32), 2)
            proposer.begin(slot, made_up_request())
        for _ in range(_ROUNDS):
            proposer.note_kv(slots, blocks, np.full(num, block_size, np.int32))
            proposer.propose(known, slots, limits, no_drafts(num, _DRAFTS))
        for slot in range(num):
            proposer.end(slot)
    proposer.pass_times.settle()
    proposer.drafting_ms = 0.0
