"""Draft heads of an engine (--speculate medusa or eagle): sized before a byte is loaded, then
loaded beside the model.

Heads guess from hidden states of the model, so its program is tapped and its runner keeps rows of
them. Heads take part in no fingerprint: they change no answer.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from quire.base.clock import Clock
from quire.base.errors import ConfigError, ModelError, SettingError
from quire.base.token_table import TokenTable
from quire.base.user_path import user_path
from quire.config.groups import EngineConfig
from quire.config.memory import DraftNeeds, MemoryPlan
from quire.engine.assembly.draft_model import PASS_TOKENS, made_up_request
from quire.engine.assembly.head_files import KINDS, HeadFiles, Kind, kind_of, read_heads
from quire.engine.assembly.model_files import model_folder
from quire.execute.executor import (
    Executor,
    ExecutorClass,
    ExecutorOptions,
    ExecutorSizing,
    StepLimits,
)
from quire.models.model_folder import box_path, check_model_folder, head_box_path
from quire.models.registry import compute_dtype
from quire.models.spec import ModelSpec
from quire.program.program import Program
from quire.program.taps import HEAD_INPUT, TAPS, with_head_input, with_taps
from quire.runner.head_runner import HeadRunner
from quire.runner.model_runner import ModelRunner
from quire.runner.slot_tables import SlotTables
from quire.runner.tapped_runner import TappedRunner, Taps
from quire.scheduler.limits import SchedulerLimits
from quire.speculative.draft_model import DraftLimits
from quire.speculative.eagle import EagleProposer
from quire.speculative.features import FeatureRing, ring_bytes
from quire.speculative.medusa import MedusaProposer
from quire.speculative.proposer import CostlyProposer, no_drafts
from quire.weights.checkpoint import Checkpoint

# Rows of hidden states that are kept at least where prompts are read, too.
PROMPT_ROWS = 1024
# Rounds of passes that are timed before the first request.
_ROUNDS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class SizedHeads:
    """Draft heads that fit the model. ring_rows: how many rows of hidden states are kept, each
    `ring_width` wide."""

    kind: Kind
    folder: Path
    files: HeadFiles
    limits: StepLimits
    ring_rows: int
    ring_width: int
    needs: DraftNeeds

    def tap(self, program: Program) -> Program:
        """Return the model's program with the outputs that the heads read."""
        return tapped(program, self.files)

    def note(self, max_model_len: int) -> str:
        """Return a line for the log."""
        longest = self.files.max_positions
        note = f"draft heads: {self.kind} heads of {self.folder}"
        if longest < max_model_len:
            note += (
                f"; they count {longest} positions, fewer than max-model-len {max_model_len}: "
                "in longer requests they begin anew"
            )
        return note

    def taps(self, num_slots: int) -> Taps:
        """Return an empty store for the hidden states of requests in `num_slots` slots."""
        ring = FeatureRing(self.ring_rows, self.ring_width, num_slots)
        return Taps(ring=ring, of_layers=bool(self.files.taps))


def runner_class(taps: Taps) -> Callable[..., ModelRunner]:
    """Return what makes the runner of a tapped program, with the arguments of ModelRunner."""
    return partial(TappedRunner, taps=taps)


def tapped(program: Program, files: HeadFiles) -> Program:
    """Return the target's program with the outputs that heads read. Raises ModelError where it has
    none such."""
    try:
        return with_taps(program, files.taps) if files.taps else with_head_input(program)
    except ValueError as error:
        raise ModelError(f"draft heads: {error}; set --speculate ngram or draft") from error


def head_kind(config: EngineConfig) -> Kind | None:
    """Return the kind of the draft heads of `config`; None for a draft model, or no drafts.

    Raises SettingError where --speculate and the files contradict each other.
    """
    settings = config.speculation
    wanted = settings.speculate
    asked = next((kind for kind in KINDS if kind == wanted), None)
    if settings.draft_model is None:
        return asked
    found = kind_of(user_path(settings.draft_model))
    if asked is not None and found is None:
        try:
            check_model_folder(user_path(settings.draft_model))  # what is there, if it is no model
        except ConfigError as error:
            raise ConfigError(f"--draft-model {error}") from None
    if asked is not None and found != asked:
        what = "a draft model" if found is None else f"{found} heads"
        rather = "draft" if found is None else found
        raise SettingError(
            f"speculate is {asked}, and {settings.draft_model} holds {what}; set --speculate "
            f"{rather}, or give the directory of {asked} heads"
        )
    if found is not None and wanted == "draft":
        raise SettingError(
            f"speculate is draft, and {settings.draft_model} holds {found} heads; set --speculate "
            f"{found}"
        )
    return found


def sized_heads(
    config: EngineConfig,
    kind: Kind,
    spec: ModelSpec,
    program: Program,
    target: Checkpoint | None,
    sizing: ExecutorSizing,
) -> SizedHeads:
    """Read the heads' configuration, compare it with the model's program, and size them.

    target: the model's checkpoint; None where heads are only sized. Raises ModelError or
    SettingError for heads that cannot be used.
    """
    if config.executor.executor == "torch":
        raise SettingError(
            f"{kind} heads need hidden states of the model, which --executor torch does not hand "
            "out; take --executor native, or another value of --speculate"
        )
    folder = _folder(config, kind)
    files = read_heads(kind, folder, program, target, compute_dtype(spec, config.model.dtype))
    max_num_seqs = config.scheduler.max_num_seqs
    limits = StepLimits(
        max_tokens=max(PASS_TOKENS, 2 * max_num_seqs) if files.taps else max_num_seqs,
        max_samples=sizing.head_rows(max_num_seqs),
        max_sequences=max_num_seqs,
    )
    needed = [sizing.memory_for(one, limits) for one in files.programs]
    width = tapped(program, files).outputs[TAPS if files.taps else HEAD_INPUT].width
    # What two steps of drafts leave of all requests, and the end of a prompt.
    ring_rows = 2 * max_num_seqs * (config.speculation.max_draft_tokens + 1)
    if files.taps:
        ring_rows += max(PROMPT_ROWS, config.scheduler.max_num_batched_tokens or 0)
    longest = config.model.max_model_len or spec.max_positions
    return SizedHeads(
        kind=kind,
        folder=folder,
        files=files,
        limits=limits,
        ring_rows=ring_rows,
        ring_width=width,
        needs=DraftNeeds(
            weights_bytes=sum(one.weights_bytes for one in needed),
            step_bytes=sum(one.step_bytes for one in needed)
            + ring_bytes(ring_rows, width, num_slots=max_num_seqs),
            token_bytes=sum(one.token_bytes for one in needed),
            max_model_len=min(longest, files.max_positions) if files.taps else longest,
        ),
    )


def load_heads(
    heads: SizedHeads,
    taps: Taps,
    executor_class: ExecutorClass,
    options: ExecutorOptions,
    *,
    memory: MemoryPlan,
    limits: SchedulerLimits,
    clock: Clock,
) -> CostlyProposer:
    """Load the heads and time their passes. options: as the model's, with `beside`."""
    files, num_slots = heads.files, limits.max_num_seqs
    executors: list[Executor] = []
    for program, checkpoint in zip(files.programs, files.checkpoints, strict=True):
        beside = options.beside or next(iter(executors), None)
        executor = executor_class(
            program, checkpoint, replace(options, limits=heads.limits, beside=beside)
        )
        if program.caches:
            executor.allocate_cache(memory.draft_blocks, memory.block_size)
        executors.append(executor)
    tables = SlotTables(
        num_slots=num_slots,
        max_model_len=memory.max_model_len,
        block_size=memory.block_size,
        jump_ahead=False,
    )
    layers, fuse = (executors[:1], executors[1]) if files.taps else (executors, None)
    runner = HeadRunner(
        layers,
        tables,
        max_samples=heads.limits.max_samples,
        vocab_size=files.programs[-1].vocab_size,
        vocabulary=files.vocabulary,
        fuse=fuse,
    )
    proposer: EagleProposer | MedusaProposer
    if files.taps:
        sizes = DraftLimits(
            num_slots=num_slots,
            num_blocks=memory.draft_blocks,
            block_size=memory.block_size,
            max_model_len=min(files.max_positions, memory.max_model_len),
            max_tokens=heads.limits.max_tokens,
        )
        proposer = EagleProposer(runner, taps.ring, sizes, clock.now_ms)
    else:
        proposer = MedusaProposer(
            runner,
            taps.ring,
            num_heads=len(executors),
            num_slots=num_slots,
            now_ms=clock.now_ms,
        )
    _time_passes(proposer, taps.ring, num_slots)
    return proposer


def _folder(config: EngineConfig, kind: Kind) -> Path:
    given = config.speculation.draft_model
    if given is not None:
        return user_path(given)
    if model_folder(config.model).resolve() != box_path().resolve():
        raise SettingError(
            f"speculate is {kind} and no heads are given; give --draft-model, the directory of "
            f"{kind} heads trained for {config.model.model} (python -m quire.train.{kind} trains "
            "some), or set --speculate ngram, which needs none"
        )
    return head_box_path(kind)


def _time_passes(
    proposer: EagleProposer | MedusaProposer, ring: FeatureRing, num_slots: int
) -> None:
    """Time passes of one request and of all, and over a prompt, so that the first decisions know
    what drafts cost."""
    prompt = min(32, len(ring.rows))
    kinds = ((1, prompt), (1, 3), (num_slots, 3))
    tenancies = itertools.count(-len(kinds) * _ROUNDS)  # below those of real requests
    for num, length in kinds:
        slots, known = np.arange(num), TokenTable(num_slots, prompt)
        for _ in range(_ROUNDS):
            for slot in range(num):
                known.admit(slot, np.zeros(length, np.int32), length)
                proposer.begin(slot, made_up_request())
            positions = np.tile(np.arange(length - 1, dtype=np.int32), num)
            of_rows = np.repeat(slots, length - 1)
            rows = np.zeros((len(of_rows), ring.rows.shape[1]), np.float32)
            ring.put(of_rows, np.full(len(of_rows), next(tenancies)), positions, rows)
            proposer.propose(known, slots, np.full(num, 3, np.int32), no_drafts(num, 3))
        for slot in range(num):
            proposer.end(slot)
    proposer.requests.pass_times.settle()
    proposer.drafting_ms = 0.0
