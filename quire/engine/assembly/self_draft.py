"""The first layers of an engine's model as its draft model (--speculate self): how many, the memory
of their passes, and loading.

Weights and KV cache are the model's, so that only buffers of a pass, which computes one token per
request, are needed besides. With several plans in flight the model computes in another thread
meanwhile, so that drafts get threads of their own; the two store in different blocks. Over ranks
each has its share of the layers (quire/ranks/first_layers.py); stages of a pipeline finish what
they have begun before a pass. Drafting by itself takes part in no fingerprint: it changes no
answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import cast

import numpy as np

from quire.base.errors import SettingError
from quire.base.log import Log
from quire.base.token_table import TokenTable
from quire.config.groups import EngineConfig
from quire.config.memory import DraftNeeds
from quire.config.proposer_kinds import any_of
from quire.engine.assembly.self_draft_trial import MAX_MS, MIN_TOKENS, tried
from quire.engine.assembly.sized_proposer import LoadedModel, SizedProposer, made_up_request
from quire.engine.assembly.sizing import pass_limits
from quire.execute.executor import Executor, ExecutorSizing, PipelinedExecutor, StepLimits
from quire.program.first_layers import first_layers, num_draft_layers, num_layers
from quire.program.program import Program
from quire.runner.draft_runner import DraftRunner
from quire.speculative.layer_choice import best_of, candidates
from quire.speculative.proposer import no_drafts
from quire.speculative.self_draft import SelfProposer

# Rounds of passes that are timed before the first request, and drafts of each.
_ROUNDS = 3
_DRAFTS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class SizedSelfDraft(SizedProposer):
    """The first layers of a model as a program. num: how many. limits: the largest pass. has_ranks:
    several ranks compute them, each its share. num_layers: of the model. choices: programs of some
    numbers of layers by these, of which the best is measured when the model is loaded; empty:
    `program` drafts. first_id: the token that measured texts begin with."""

    program: Program
    num: int
    limits: StepLimits
    needs: DraftNeeds
    has_ranks: bool
    num_layers: int
    choices: Mapping[int, Program] = field(default_factory=dict)
    max_drafts: int = 1
    first_id: int = 0

    def notes(self, max_model_len: int) -> list[str]:
        """See SizedProposer."""
        name = self.program.name
        if self.choices:
            name = f"first layers of the model, {any_of(map(str, self.choices))}, as measured"
        return [f"drafts: {name}, at most {self.limits.max_sequences} requests a pass"]

    def load(self, model: LoadedModel) -> SelfProposer:
        """See SizedProposer: the layers have the weights and the cache of the model's executor."""
        memory, num_slots = model.memory, model.limits.max_num_seqs
        num = self._chosen(model)
        is_beside = model.limits.plans_in_flight > 1
        is_beside &= not isinstance(model.executor, PipelinedExecutor)  # runs in the same thread
        own_threads = model.options.num_threads if is_beside else 0
        runner = DraftRunner(
            self._executor_of(num, model, own_threads),
            num_slots=num_slots,
            max_model_len=memory.max_model_len,
            block_size=memory.block_size,
            max_samples=self.limits.max_samples,
        )
        sizes = model.draft_limits(
            max_model_len=memory.max_model_len, max_tokens=self.limits.max_tokens, num_blocks=0
        )._replace(block_size=memory.block_size)
        proposer = SelfProposer(runner, sizes, model.clock.now_ms)
        proposer.settle = model.settle
        _time_passes(proposer, num_slots, memory.num_blocks, memory.block_size)
        return proposer

    def _executor_of(self, num: int, model: LoadedModel, own_threads: int = 0) -> Executor:
        """Return an executor of the first `num` layers, within the context of the engine."""
        program = replace(
            self.choices.get(num, self.program), max_positions=model.memory.max_model_len
        )
        own = replace(self, program=program, num=num)
        return _first_layers_of(model.executor, own, own_threads)

    def _chosen(self, model: LoadedModel) -> int:
        """Return how many layers draft: of several numbers the best, as measured."""
        if not self.choices:
            return self.num
        trial = tried(
            model,
            {num: num / self.num_layers for num in self.choices},
            lambda num: self._executor_of(num, model),
            first_id=self.first_id,
            max_samples=min(self.limits.max_samples, model.options.limits.max_samples),
        )
        log = Log("engine")
        if trial is None:
            log.event(
                "first layers are not measured",
                because=f"texts of {MIN_TOKENS} tokens would take over {MAX_MS / 1000:.0f} s or "
                "exceed the context",
                drafts=self.program.name,
                to_do="set --self-draft-layers to the best number for your texts",
            )
            return self.num
        best = best_of(trial.measured, trial.times, self.max_drafts)
        log.event(
            "first layers are measured",
            drafts=self.choices[best.num].name,
            agreed="; ".join(
                f"{one.num}: {one.first:.0%} in {one.pass_ms:.2f} ms" for one in trial.measured
            ),
            step_ms=round(trial.times.step_ms, 2),
            tokens=trial.num_tokens,
            ms=round(trial.ms),
        )
        return best.num


def sized_self_draft(
    config: EngineConfig, program: Program, sizing: ExecutorSizing, first_id: int = 0
) -> SizedSelfDraft:
    """Cut the first layers of `program` and size them. first_id: the token that texts begin with.

    Raises SettingError where there are no layers that can draft.
    """
    total, given = num_layers(program), config.speculation.self_draft_layers
    if total < 2 or (given is not None and given >= total):
        wanted = "speculate is self" if given is None else f"self_draft_layers is {given}"
        raise SettingError(
            f"{wanted} and the model has {total} layers, of which fewer than all can draft; "
            + (f"set 1 to {total - 1}" if total > 1 else "set --speculate ngram or off")
        )
    num, has_ranks = num_draft_layers(program, given), config.executor.num_ranks > 1
    nums = () if given is not None or total < 3 else candidates(total)
    try:
        short = first_layers(program, num)
        choices = {one: first_layers(program, one) for one in nums}
    except ValueError as error:
        raise SettingError(
            f"the first {num} layers cannot draft for this model ({error}); set another "
            "--self-draft-layers, or --speculate ngram, or give a --draft-model"
        ) from error
    largest = choices[max(choices)] if choices else short
    return SizedSelfDraft(
        program=short,
        num=num,
        limits=pass_limits(config, sizing),
        needs=DraftNeeds(
            name="first layers",
            step_bytes=_pass_bytes(config, program, largest, sizing),
            max_model_len=program.max_positions,
            advice="set --speculate ngram",
        ),
        has_ranks=has_ranks,
        num_layers=total,
        choices=choices,
        max_drafts=config.speculation.max_draft_tokens,
        first_id=first_id,
    )


def _pass_bytes(
    config: EngineConfig, program: Program, short: Program, sizing: ExecutorSizing
) -> int:
    """Return the bytes of the buffers of a pass, of all ranks together."""
    limits = pass_limits(config, sizing)
    if config.executor.num_ranks == 1:
        return sizing.memory_for(short, limits).step_bytes
    from quire.engine.assembly.ranks import class_of, draft_layers  # only where there are ranks

    ranks = class_of(config.executor, config.cache.block_size)
    shares = replace(ranks, drafts=draft_layers(config, sizing)).draft_shares(program)
    return max(
        sum(sizing.memory_for(share.programs[num], limits).step_bytes for share in shares)
        for num in shares[0].programs
    )


def _first_layers_of(model: Executor, draft: SizedSelfDraft, num_threads: int) -> Executor:
    """Return an executor of the first layers. num_threads: of its own; 0: the model's."""
    if draft.has_ranks:
        from quire.ranks.leading import LeadingExecutor

        of_ranks = cast(LeadingExecutor, model).first_layers(draft.num, num_threads)
        of_ranks.share_cache()
        return of_ranks
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
    proposer.begin_to_count()
