"""Draft heads of the exact tests: drawn weights, over hidden states of the model of a case.

They are mostly wrong, and their runner and their tapped program are what servers use. Some steps of
decoding keep no hidden states, as in a rest. Whatever they propose, every token and log-probability
must stay as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from quire.execute.executor import Executor
from quire.models.config_reader import ConfigReader, load_config
from quire.models.eagle import EMBEDDING, FUSE, SOURCES, build_eagle, build_fuse, read_eagle
from quire.models.medusa import build_medusa_head, head_tensors, read_medusa
from quire.program.ops import Embed
from quire.program.program import Program
from quire.program.taps import HEAD_INPUT, num_layers_of, with_head_input, with_taps
from quire.program.tensors import DType
from quire.runner.draft_head_runner import DraftHeadRunner
from quire.runner.slot_tables import SlotTables
from quire.runner.tapped_runner import Taps
from quire.speculative.eagle import EagleProposer
from quire.speculative.hidden_states import HiddenStateRing
from quire.speculative.medusa import MedusaProposer
from quire.speculative.passes import DraftLimits
from quire.weights.binding import bind
from quire.weights.checkpoint import Checkpoint, open_checkpoint
from quire.weights.chosen_tensors import ChosenTensors
from tests.draft_heads import eagle_tensors, medusa_tensors, write_eagle, write_medusa
from tests.exact.drafts import draft_block_size
from tests.exact.workload import Settings

NUM_MEDUSA_HEADS = 3
MAX_POSITIONS = 512  # that an EAGLE head counts
# In turns of so many steps one, two or three of decoding keep no hidden states.
RESTING_STEPS = 6
MakeExecutor = Callable[[Program, Checkpoint], Executor]


class RestingRing(HiddenStateRing):
    """A HiddenStateRing with some steps of rest."""

    def keeps(self, step: int, *, is_decode: bool) -> bool:
        """See HiddenStateRing."""
        turn, place = divmod(step, RESTING_STEPS)
        if not place:
            self.pause(step + turn % 3)
        return super().keeps(step, is_decode=is_decode)


class Heads:
    """Heads of one kind for a model, with executors that are made once."""

    def __init__(
        self, kind: str, folder: Path, program: Program, target: Checkpoint, make: MakeExecutor
    ) -> None:
        self.kind = kind
        own = folder / f"{kind}-{program.caches[0].precision}"
        dtype = program.outputs["logits"].dtype
        dtype = next((view.dtype for op in program.segments["head"] for view in op.inputs), dtype)
        if kind == "medusa":
            self.program = with_head_input(program)
            self.width = self.program.outputs[HEAD_INPUT].width
            programs, checkpoints, self.vocabulary = _medusa(own, self.width, program, dtype)
        else:
            layers = tuple(range(num_layers_of(program)))
            self.program = with_taps(program, layers)
            self.width = len(layers) * program.outputs["hidden"].width
            programs, checkpoints, self.vocabulary = _eagle(own, self.width, program, target, dtype)
        self.vocab_size = program.vocab_size
        self.executors = [
            make(one, checkpoint) for one, checkpoint in zip(programs, checkpoints, strict=True)
        ]

    def proposer(
        self, settings: Settings, max_model_len: int
    ) -> tuple[MedusaProposer | EagleProposer, Taps]:
        """Return a proposer for a case, and where its runner leaves hidden states: often few."""
        num_slots, size = settings.max_num_seqs, draft_block_size(settings)
        num_blocks = max(settings.draft_blocks, 3)
        if self.kind == "eagle":
            self.executors[0].allocate_cache(num_blocks, size)
        tables = SlotTables(
            num_slots=num_slots, max_model_len=max_model_len, block_size=size, jump_ahead=False
        )
        is_eagle = self.kind == "eagle"
        runner = DraftHeadRunner(
            self.executors[:1] if is_eagle else self.executors,
            tables,
            max_samples=settings.max_samples,
            vocab_size=self.vocab_size,
            vocabulary=self.vocabulary,
            fuse=self.executors[1] if is_eagle else None,
            feeds_back=is_eagle,
            has_cache=is_eagle,
        )
        ring = RestingRing(10 * num_slots, self.width, num_slots)
        times = count()

        def now_ms() -> float:
            return float(next(times))

        taps = Taps(ring=ring, of_layers=is_eagle)
        if not is_eagle:
            heads = len(self.executors)
            medusa = MedusaProposer(
                runner, ring, num_heads=heads, num_slots=num_slots, now_ms=now_ms
            )
            return medusa, taps
        longest = min(max_model_len, MAX_POSITIONS)
        limits = DraftLimits(num_slots, num_blocks, size, longest, 2 * num_slots)
        return EagleProposer(runner, ring, limits, now_ms), taps

    def close(self) -> None:
        """Free the executors."""
        for executor in self.executors:
            executor.close()


def _medusa(folder: Path, width: int, program: Program, dtype: DType) -> tuple[Any, Any, None]:
    tensors = medusa_tensors(
        hidden_size=width, vocab_size=program.vocab_size, num_heads=NUM_MEDUSA_HEADS
    )
    write_medusa(folder, tensors)
    spec = read_medusa(_config(folder))
    checkpoint = open_checkpoint(folder)
    head = build_medusa_head(spec, hidden_size=width, vocab_size=program.vocab_size, dtype=dtype)
    chosen = [
        ChosenTensors(folder, {name: (checkpoint, stored) for name, stored in names.items()})
        for names in head_tensors(spec, checkpoint.names, str(folder))
    ]
    return [head] * NUM_MEDUSA_HEADS, chosen, None


def _eagle(
    folder: Path, columns: int, program: Program, target: Checkpoint, dtype: DType
) -> tuple[Any, Any, Any]:
    embed = next(op for op in program.segments["trunk"] if isinstance(op, Embed))
    weight = program.weights[embed.weight]
    tensors = eagle_tensors(hidden_size=weight.columns, vocab_size=program.vocab_size)
    rng = np.random.default_rng(4)
    tensors[FUSE] = rng.normal(0, columns**-0.5, (weight.columns, columns)).astype(np.float32)
    write_eagle(folder, tensors, vocab_size=program.vocab_size, hidden_size=weight.columns)
    spec = read_eagle(_config(folder))
    layer = build_eagle(
        spec, vocab_size=program.vocab_size, dtype=dtype, max_positions=MAX_POSITIONS
    )
    fuse = build_fuse(spec, columns=columns, vocab_size=program.vocab_size, dtype=dtype)
    checkpoint = open_checkpoint(folder)
    sources: dict[str, tuple[Checkpoint, str]] = {
        SOURCES[name]: (checkpoint, name) for name in SOURCES if name != EMBEDDING
    }
    sources[SOURCES[EMBEDDING]] = target, bind(program, target).stored_name(weight.parts[0])
    vocabulary = (tensors["d2t"] + np.arange(len(tensors["d2t"]))).astype(np.int32)
    chosen = [
        ChosenTensors(folder, sources),
        ChosenTensors(folder, {FUSE: (checkpoint, FUSE)}),
    ]
    return [layer, fuse], chosen, vocabulary


def _config(folder: Path) -> ConfigReader:
    return ConfigReader(load_config(folder / "config.json"), where=str(folder))
