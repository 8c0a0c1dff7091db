"""Draft heads of an engine (--speculate medusa): checked and sized before a byte is loaded.

Heads guess from hidden states of the model, so its program is tapped and its runner keeps rows of
them. They are trained for one model: sizes are compared with it, and differences are listed. Heads
take part in no fingerprint: they change no answer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from quire.base.clock import Clock
from quire.base.errors import ModelError, SettingError
from quire.base.regular_file import is_present
from quire.base.token_table import TokenTable
from quire.base.user_path import user_path
from quire.config.groups import EngineConfig
from quire.config.memory import DraftNeeds, MemoryPlan
from quire.engine.assembly.draft_model import made_up_request
from quire.engine.assembly.model_files import model_folder
from quire.execute.executor import (
    Executor,
    ExecutorClass,
    ExecutorOptions,
    ExecutorSizing,
    StepLimits,
)
from quire.models.config_reader import ConfigReader, load_config
from quire.models.medusa import build_medusa_head, head_tensors, read_medusa
from quire.models.model_folder import box_path, head_box_path
from quire.models.registry import compute_dtype
from quire.models.spec import ModelSpec
from quire.program.program import Program
from quire.program.taps import HEAD_INPUT, with_head_input
from quire.program.tensors import DType
from quire.runner.head_runner import HeadRunner
from quire.runner.slot_tables import SlotTables
from quire.runner.tapped_runner import Taps
from quire.scheduler.limits import SchedulerLimits
from quire.speculative.features import FeatureRing, ring_bytes
from quire.speculative.medusa import MedusaProposer
from quire.speculative.proposer import CostlyProposer, no_drafts
from quire.weights.checkpoint import Checkpoint, open_checkpoint
from quire.weights.chosen_tensors import ChosenTensors

if TYPE_CHECKING:
    from quire.speculative.head_proposer import HeadRequests

Kind = Literal["medusa"]
KINDS: tuple[Kind, ...] = ("medusa",)
MEDUSA_FILE = "medusa_lm_head.safetensors"
# Rounds of passes that are timed before the first request.
_ROUNDS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class SizedHeads:
    """Draft heads that fit the model. programs, checkpoints: of each head. ring_rows: how many rows
    of hidden states are kept, each `ring_width` wide."""

    kind: Kind
    folder: Path
    programs: tuple[Program, ...]
    checkpoints: tuple[Checkpoint, ...]
    limits: StepLimits
    ring_rows: int
    ring_width: int
    needs: DraftNeeds
    tap: Callable[[Program], Program]

    def note(self, max_model_len: int) -> str:
        """Return a line for the log."""
        return f"draft heads: {len(self.programs)} {self.kind} heads of {self.folder}"

    def taps(self, num_slots: int) -> Taps:
        """Return an empty store for the hidden states of requests in `num_slots` slots."""
        ring = FeatureRing(self.ring_rows, self.ring_width, num_slots)
        return Taps(ring=ring, of_layers=False)


def head_kind(config: EngineConfig) -> Kind | None:
    """Return the kind of the draft heads of `config`; None for a draft model, or no drafts.

    Raises SettingError where --speculate and the files contradict each other.
    """
    settings = config.scheduler
    wanted = settings.speculate
    asked = next((kind for kind in KINDS if kind == wanted), None)
    if settings.draft_model is None:
        return asked
    found = _kind_of(user_path(settings.draft_model))
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
    config: EngineConfig, kind: Kind, spec: ModelSpec, program: Program, sizing: ExecutorSizing
) -> SizedHeads:
    """Read the heads' configuration, compare it with the model's program, and size them.

    Raises ModelError or SettingError for heads that cannot be used.
    """
    if config.executor.executor == "torch":
        raise SettingError(
            f"{kind} heads need hidden states of the model, which --executor torch does not hand "
            "out; take --executor native, or another value of --speculate"
        )
    folder = _folder(config, kind)
    max_num_seqs = config.scheduler.max_num_seqs
    limits = StepLimits(
        max_tokens=max_num_seqs,
        max_samples=sizing.head_rows(max_num_seqs),
        max_sequences=max_num_seqs,
    )
    dtype = compute_dtype(spec, config.model.dtype)
    programs, checkpoints = _medusa(folder, program, dtype)
    needed = [sizing.memory_for(one, limits) for one in programs]
    width = with_head_input(program).outputs[HEAD_INPUT].width
    # What two steps leave of all requests.
    ring_rows = 2 * max_num_seqs * (config.scheduler.max_draft_tokens + 1)
    return SizedHeads(
        kind=kind,
        folder=folder,
        programs=programs,
        checkpoints=checkpoints,
        limits=limits,
        ring_rows=ring_rows,
        ring_width=width,
        needs=DraftNeeds(
            weights_bytes=sum(one.weights_bytes for one in needed),
            step_bytes=sum(one.step_bytes for one in needed) + ring_bytes(ring_rows, width),
            token_bytes=0,
            max_model_len=config.model.max_model_len or spec.max_positions,
        ),
        tap=with_head_input,
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
    executors: list[Executor] = []
    for program, checkpoint in zip(heads.programs, heads.checkpoints, strict=True):
        beside = options.beside or next(iter(executors), None)
        executor = executor_class(
            program, checkpoint, replace(options, limits=heads.limits, beside=beside)
        )
        executor.allocate_cache(1, memory.block_size)
        executors.append(executor)
    tables = SlotTables(
        num_slots=limits.max_num_seqs,
        max_model_len=memory.max_model_len,
        block_size=memory.block_size,
        jump_ahead=False,
    )
    runner = HeadRunner(
        executors,
        tables,
        max_samples=heads.limits.max_samples,
        vocab_size=heads.programs[0].vocab_size,
    )
    proposer = MedusaProposer(
        runner,
        taps.ring,
        num_heads=len(executors),
        num_slots=limits.max_num_seqs,
        now_ms=clock.now_ms,
    )
    _time_passes(proposer, proposer.requests, taps.ring, limits.max_num_seqs)
    return proposer


def _folder(config: EngineConfig, kind: Kind) -> Path:
    given = config.scheduler.draft_model
    if given is not None:
        return user_path(given)
    if model_folder(config.model).resolve() != box_path().resolve():
        raise SettingError(
            f"speculate is {kind} and no heads are given; give --draft-model, the directory of "
            f"{kind} heads trained for {config.model.model} (python -m quire.train.{kind} trains "
            "some), or set --speculate ngram, which needs none"
        )
    return head_box_path(kind)


def _kind_of(folder: Path) -> Kind | None:
    """Return what kind of heads a directory holds, by its config.json; None: something else."""
    if not folder.is_dir() or not is_present(folder / "config.json"):
        return None
    values = load_config(folder / "config.json")
    names = values.get("architectures")
    first = names[0] if isinstance(names, list) and names else None
    if values.get("model_type") == "medusa" or "medusa_num_heads" in values:
        return "medusa"
    return "medusa" if first == "MedusaModel" else None


def _medusa(
    folder: Path, program: Program, dtype: DType
) -> tuple[tuple[Program, ...], tuple[Checkpoint, ...]]:
    """Return the program and the tensors of each head, compared with the target's `program`."""
    where = folder / "config.json"
    spec = read_medusa(ConfigReader(load_config(where), where=str(where)))
    has_own_file = is_present(folder / MEDUSA_FILE) and not is_present(folder / "model.safetensors")
    checkpoint = open_checkpoint(folder / MEDUSA_FILE if has_own_file else folder)
    heads = head_tensors(spec, checkpoint.names, str(folder))
    hidden_size = with_head_input(program).outputs[HEAD_INPUT].width
    problems = [
        f"{name} in config.json is {found}; the model's is {needed}"
        for name, found, needed in (
            ("hidden_size", spec.hidden_size, hidden_size),
            ("vocab_size", spec.vocab_size, program.vocab_size),
        )
        if found not in (0, needed)
    ]
    head = build_medusa_head(
        spec, hidden_size=hidden_size, vocab_size=program.vocab_size, dtype=dtype
    )
    shapes = head.source_shapes()
    for tensors in heads:
        for name, stored in tensors.items():
            found = checkpoint.describe(stored)[1]
            if found != shapes[name]:
                problems.append(f"{stored} is {list(found)}; the model needs {list(shapes[name])}")
    if problems:
        raise ModelError(
            f"{folder}: these Medusa heads were made for another model than {program.name} with "
            f"hidden size {hidden_size} and {program.vocab_size} token ids:"
            + "".join(f"\n  - {problem}" for problem in problems[:20])
            + "\ntake heads that were trained for this model, or train some with "
            "`python -m quire.train.medusa`"
        )
    chosen = tuple(
        ChosenTensors(folder, {name: (checkpoint, stored) for name, stored in tensors.items()})
        for tensors in heads
    )
    return (head,) * len(heads), chosen


def _time_passes(
    proposer: CostlyProposer, requests: HeadRequests, ring: FeatureRing, num_slots: int
) -> None:
    """Time passes of one request and of all, so that the first decisions know what drafts cost."""
    known = TokenTable(num_slots, 8)
    for num in sorted({1, num_slots}):
        slots = np.arange(num)
        for slot in range(num):
            known.admit(slot, np.zeros(2, np.int32), 2)
            proposer.begin(slot, made_up_request())
        for round_ in range(_ROUNDS):
            rows = np.zeros((num, ring.rows.shape[1]), np.float32)
            ring.put(slots, np.full(num, -1 - round_, np.int64), np.zeros(num, np.int32), rows)
            proposer.propose(known, slots, np.full(num, 3, np.int32), no_drafts(num, 3))
        for slot in range(num):
            proposer.end(slot)
    requests.pass_times.settle()
    proposer.drafting_ms = 0.0
