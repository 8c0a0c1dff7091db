"""What computes drafts in an engine, if anything does: a draft model, the model's first layers, or
draft heads; or what prompt lookup keeps of earlier answers.

Imported only where one of them is used (SpeculationConfig.has_drafting). Order: sized before a byte
is loaded, as a part of the memory plan, then loaded beside the model. Always holds: an engine has
one proposer of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from quire.base.clock import Clock
from quire.base.errors import SettingError
from quire.config.groups import EngineConfig
from quire.config.memory import NO_DRAFT, DraftNeeds, MemoryPlan
from quire.engine.assembly.draft_model import SizedDraft, load_draft, sized_draft
from quire.engine.assembly.heads import SizedHeads, head_kind, load_heads, sized_heads
from quire.engine.assembly.self_draft import load_self_draft
from quire.engine.assembly.self_draft_size import SizedSelfDraft, sized_self_draft
from quire.execute.executor import Executor, ExecutorClass, ExecutorOptions, ExecutorSizing
from quire.models.spec import ModelSpec
from quire.program.program import Program
from quire.runner.tapped_runner import Taps
from quire.scheduler.limits import SchedulerLimits
from quire.speculative.drafter import Drafter
from quire.speculative.history import HistoryProposer, history_bytes
from quire.speculative.proposer import Proposer
from quire.speculative.self_draft import SelfDrafter
from quire.weights.checkpoint import Checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class SizedDrafting:
    """At most one of `draft`, `layers` and `heads`; history_tokens: of earlier answers, by tenant;
    0: none are kept. num_ranks: of the model; with several, rank 0 alone has what drafts."""

    draft: SizedDraft | None = None
    layers: SizedSelfDraft | None = None
    heads: SizedHeads | None = None
    history_tokens: int = 0
    num_ranks: int = 1

    @property
    def needs(self) -> DraftNeeds:
        """Return the memory that is needed for drafts."""
        part = self.draft or self.layers or self.heads
        needs = NO_DRAFT if part is None else part.needs
        return replace(needs, history_bytes=history_bytes(self.history_tokens))

    def check(self, executor_class: ExecutorClass) -> None:
        """Raise where an executor cannot compute what drafts."""
        if self.num_ranks > 1:
            executor_class = _whole_class()
        programs = () if self.heads is None else self.heads.files.programs
        for program in programs if self.draft is None else (self.draft.program,):
            executor_class.check_program(program)

    def tap(self, program: Program) -> Program:
        """Return the model's program: with hidden states as outputs where heads read them."""
        return program if self.heads is None else self.heads.tap(program)

    def taps(self, num_slots: int) -> Taps | None:
        """Return an empty store for hidden states of requests; None where nothing reads them."""
        return None if self.heads is None else self.heads.taps(num_slots)

    @property
    def drafter_class(self) -> type[Drafter]:
        """Return the class of the source of drafts."""
        return Drafter if self.layers is None else SelfDrafter

    def notes(self, max_model_len: int) -> list[str]:
        """Return lines for the log."""
        part = self.draft or self.layers or self.heads
        return [] if part is None else [part.note(max_model_len)]


def sized_drafting(
    config: EngineConfig,
    spec: ModelSpec,
    program: Program,
    checkpoint: Checkpoint | None,
    sizing: ExecutorSizing,
) -> SizedDrafting:
    """Read the configuration of what drafts, compare it with the model's program, and size it.

    checkpoint: of the model; None where nothing will be loaded. Raises ModelError or SettingError
    for what cannot be used.
    """
    settings = config.speculation
    if settings.speculate_history_tokens:
        return SizedDrafting(history_tokens=settings.speculate_history_tokens)
    if settings.drafts_itself:
        return SizedDrafting(layers=sized_self_draft(config, program, sizing))
    kind, num_ranks = head_kind(config), config.executor.num_ranks
    if num_ranks > 1:
        sizing = _whole_class()
    if kind is None:
        return SizedDrafting(draft=sized_draft(config, spec, sizing), num_ranks=num_ranks)
    if config.executor.pipeline_parallel_size > 1:
        raise SettingError(
            f"{config.executor.ranks_text}, and draft_model is draft heads ({kind}), which read "
            "hidden states of all layers: take tensor_parallel_size, or a draft model of its own"
        )
    heads = sized_heads(config, kind, spec, program, checkpoint, sizing)
    return SizedDrafting(heads=heads, num_ranks=num_ranks)


def _whole_class() -> ExecutorClass:
    """Return the class of what drafts beside a model over ranks, in the process of rank 0."""
    from quire.execute.native import NativeExecutor  # only there: ranks have no other executor

    return NativeExecutor


def loaded_proposer(
    drafting: SizedDrafting,
    executor: Executor,
    executor_class: ExecutorClass,
    options: ExecutorOptions,
    *,
    memory: MemoryPlan,
    limits: SchedulerLimits,
    clock: Clock,
    taps: Taps | None,
) -> Proposer | None:
    """Load what computes drafts; None where it is prompt lookup in the request alone.

    executor: of the model. options: as the model's.
    """
    if drafting.history_tokens:
        return HistoryProposer(limits.max_num_seqs, drafting.history_tokens)
    options = replace(options, beside=executor if limits.plans_in_flight == 1 else None)
    block_size = memory.block_size
    if drafting.layers is not None:
        return load_self_draft(
            drafting.layers,
            executor,
            memory=memory,
            block_size=block_size,
            limits=limits,
            num_threads=options.num_threads,
            clock=clock,
        )
    if drafting.num_ranks > 1:
        executor_class = _whole_class()
        threads = max(options.num_threads // drafting.num_ranks, 1)
        options = replace(options, num_threads=threads)
    if drafting.heads is not None:
        assert taps is not None, "the runner keeps hidden states for heads"
        return load_heads(
            drafting.heads,
            taps,
            executor_class,
            options,
            memory=memory,
            limits=limits,
            clock=clock,
        )
    if drafting.draft is None:
        return None
    return load_draft(
        drafting.draft,
        executor_class,
        options,
        memory=memory,
        block_size=block_size,
        limits=limits,
        clock=clock,
    )
