"""Draft heads of an engine (--speculate medusa or eagle): sized before a byte is loaded, then
loaded beside the model.

Heads guess from hidden states of the model, so its program is tapped and its runner keeps rows of
them. What a head does is in HeadFiles: whether it has a KV cache, is fed its own hidden states, and
needs those of the model fused. Heads take part in no fingerprint: they change no answer.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import assert_never

import numpy as np

from quire.base.errors import ModelError
from quire.base.token_table import TokenTable
from quire.config.groups import EngineConfig
from quire.config.memory import DraftNeeds
from quire.config.proposer_kinds import HeadName
from quire.engine.assembly.draft_files import draft_folder
from quire.engine.assembly.draft_model import PASS_TOKENS
from quire.engine.assembly.head_files import HeadFiles, read_heads
from quire.engine.assembly.sized_proposer import LoadedModel, SizedProposer, made_up_request
from quire.execute.executor import Executor, ExecutorClass, ExecutorSizing, StepLimits
from quire.models.registry import compute_dtype
from quire.models.spec import ModelSpec
from quire.program.program import Program
from quire.program.taps import HEAD_INPUT, TAPS, with_head_input, with_taps
from quire.runner.draft_head_runner import DraftHeadRunner
from quire.runner.model_runner import ModelRunner
from quire.runner.slot_tables import SlotTables
from quire.runner.tapped_runner import TappedPipelinedRunner, TappedRunner, Taps
from quire.speculative.draft_heads import HeadProposer
from quire.speculative.eagle import EagleProposer
from quire.speculative.hidden_states import HiddenStateRing, ring_bytes
from quire.speculative.medusa import MedusaProposer
from quire.speculative.proposer import no_drafts
from quire.weights.checkpoint import Checkpoint

# Rows of hidden states that are kept at least where prompts are read, too.
PROMPT_ROWS = 1024
# Rounds of passes that are timed before the first request.
_ROUNDS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class SizedHeads(SizedProposer):
    """Draft heads that fit the model. ring_rows: how many rows of hidden states are kept, each
    `ring_width` wide. Each kind has its proposer."""

    name: HeadName
    folder: Path
    files: HeadFiles
    limits: StepLimits
    ring_rows: int
    ring_width: int
    needs: DraftNeeds

    def check(self, executor_class: ExecutorClass) -> None:
        """See SizedProposer."""
        for program in self.files.all_programs:
            executor_class.check_program(program)

    def tap(self, program: Program) -> Program:
        """See SizedProposer."""
        return tapped(program, self.files)

    def taps(self, num_slots: int) -> Taps:
        """See SizedProposer."""
        ring = HiddenStateRing(self.ring_rows, self.ring_width, num_slots)
        return Taps(ring=ring, of_layers=bool(self.files.tapped_layers))

    def notes(self, max_model_len: int) -> list[str]:
        """See SizedProposer."""
        longest = self.files.max_positions
        note = f"draft heads: {self.name} heads of {self.folder}"
        if longest < max_model_len:
            note += (
                f"; they count {longest} positions, fewer than max-model-len {max_model_len}: "
                "in longer requests they begin anew"
            )
        return [note]

    def load(self, model: LoadedModel) -> HeadProposer:
        """See SizedProposer."""
        assert model.taps is not None, "the runner keeps hidden states for heads"
        proposer = self._proposer(self._runner(model), model, model.taps.ring)
        _time_passes(proposer, model.taps.ring, model.limits.max_num_seqs)
        return proposer

    @abstractmethod
    def _proposer(
        self, runner: DraftHeadRunner, model: LoadedModel, ring: HiddenStateRing
    ) -> HeadProposer:
        """Return the proposer of the kind."""

    def _runner(self, model: LoadedModel) -> DraftHeadRunner:
        """Load the heads. All share the compute threads of the model or of the first of them."""
        files, executors = self.files, list[Executor]()
        options = model.options_of(self.limits)
        for program, checkpoint in zip(files.all_programs, files.all_checkpoints, strict=True):
            beside = options.beside or next(iter(executors), None)
            executor = model.executor_class(program, checkpoint, replace(options, beside=beside))
            if program.caches:
                executor.allocate_cache(model.draft_blocks, model.block_tokens)
            executors.append(executor)
        tables = SlotTables(
            num_slots=model.limits.max_num_seqs,
            max_model_len=model.memory.max_model_len,
            block_size=model.block_tokens,
            jump_ahead=False,
        )
        num_heads = len(files.programs)
        return DraftHeadRunner(
            executors[:num_heads],
            tables,
            max_samples=self.limits.max_samples,
            vocab_size=files.all_programs[-1].vocab_size,
            vocabulary=files.vocabulary,
            fuse=next(iter(executors[num_heads:]), None),
            feeds_back=files.feeds_back,
            has_cache=files.has_cache,
        )


class SizedMedusa(SizedHeads):
    """Heads that are each run once, on the hidden state before the last token."""

    def _proposer(
        self, runner: DraftHeadRunner, model: LoadedModel, ring: HiddenStateRing
    ) -> MedusaProposer:
        return MedusaProposer(
            runner,
            ring,
            num_heads=len(self.files.programs),
            num_slots=model.limits.max_num_seqs,
            now_ms=model.clock.now_ms,
        )


class SizedEagle(SizedHeads):
    """A head with a KV cache of its own, which reads its own guesses."""

    def _proposer(
        self, runner: DraftHeadRunner, model: LoadedModel, ring: HiddenStateRing
    ) -> EagleProposer:
        sizes = model.draft_limits(
            max_model_len=self.files.max_positions, max_tokens=self.limits.max_tokens
        )
        return EagleProposer(runner, ring, sizes, model.clock.now_ms)


def runner_class(taps: Taps, *, is_staged: bool) -> Callable[..., ModelRunner]:
    """Return what makes the runner of a tapped program, with the arguments of ModelRunner.

    is_staged: on several stages.
    """
    return partial(TappedPipelinedRunner if is_staged else TappedRunner, taps=taps)


def tapped(program: Program, files: HeadFiles) -> Program:
    """Return the target's program with the outputs that heads read. Raises ModelError where it has
    none such."""
    layers = files.tapped_layers
    try:
        return with_taps(program, layers) if layers else with_head_input(program)
    except ValueError as error:
        raise ModelError(f"draft heads: {error}; set --speculate ngram or draft") from error


def sized_heads(
    config: EngineConfig,
    name: HeadName,
    spec: ModelSpec,
    program: Program,
    target: Checkpoint | None,
    sizing: ExecutorSizing,
) -> SizedHeads:
    """Read the heads' configuration, compare it with the model's program, and size them.

    target: the model's checkpoint; None where heads are only sized. Raises ModelError or
    SettingError for heads that cannot be used.
    """
    folder = draft_folder(config, name)
    files = read_heads(name, folder, program, target, compute_dtype(spec, config.model.dtype))
    max_num_seqs = config.scheduler.max_num_seqs
    # Heads with a cache compute prompts as well, as far as their hidden states are kept.
    limits = StepLimits(
        max_tokens=max(PASS_TOKENS, 2 * max_num_seqs) if files.has_cache else max_num_seqs,
        max_samples=sizing.head_rows(max_num_seqs),
        max_sequences=max_num_seqs,
    )
    needed = [sizing.memory_for(one, limits) for one in files.all_programs]
    output = TAPS if files.tapped_layers else HEAD_INPUT
    width = tapped(program, files).outputs[output].width
    # What two steps of drafts leave of all requests, and the end of a prompt.
    ring_rows = 2 * max_num_seqs * (config.speculation.max_draft_tokens + 1)
    if files.has_cache:
        ring_rows += max(PROMPT_ROWS, config.scheduler.max_num_batched_tokens or 0)
    longest = config.model.max_model_len or spec.max_positions
    return _class_of(name)(
        name=name,
        folder=folder,
        files=files,
        limits=limits,
        ring_rows=ring_rows,
        ring_width=width,
        needs=DraftNeeds(
            name="draft heads",
            weights_bytes=sum(one.weights_bytes for one in needed),
            step_bytes=sum(one.step_bytes for one in needed),
            token_bytes=sum(one.token_bytes for one in needed),
            max_model_len=min(longest, files.max_positions) if files.has_cache else longest,
            host_bytes=ring_bytes(ring_rows, width, num_slots=max_num_seqs),
            host_what="hidden states",
            advice="leave the draft heads out",
        ),
    )


def _class_of(name: HeadName) -> type[SizedHeads]:
    match name:
        case "medusa":
            return SizedMedusa
        case "eagle":
            return SizedEagle
        case _:
            assert_never(name)


def _time_passes(proposer: HeadProposer, ring: HiddenStateRing, num_slots: int) -> None:
    """Time passes of one request and of all, and over a prompt, so that the first decisions know
    what drafts cost."""
    prompt = min(32, len(ring.rows))
    kinds = ((1, prompt), (1, 3), (num_slots, 3))
    for num, length in kinds:
        slots, known = np.arange(num), TokenTable(num_slots, prompt)
        for _ in range(_ROUNDS):
            for slot in range(num):
                known.admit(slot, np.zeros(length, np.int32), length)
                proposer.begin(slot, made_up_request())
            positions = np.tile(np.arange(length - 1, dtype=np.int32), num)
            of_rows = np.repeat(slots, length - 1)
            rows = np.zeros((len(of_rows), ring.rows.shape[1]), np.float32)
            ring.put(of_rows, ring.tenancy[of_rows], positions, rows)
            proposer.propose(known, slots, np.full(num, 3, np.int32), no_drafts(num, 3))
        for slot in range(num):
            proposer.end(slot)
    proposer.begin_to_count()
