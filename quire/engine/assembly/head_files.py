"""Draft heads as they lie in a directory: their kind, their programs and their tensors.

Compares configuration, shapes and token tables with the target's program, and reads no weights but
these tables. Differences are listed together, with what the model needs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import assert_never

import numpy as np
from numpy.typing import NDArray

from quire.base.errors import ModelError, WeightsError
from quire.base.regular_file import is_present
from quire.base.show import show
from quire.config.proposer_kinds import HeadName
from quire.models.config_reader import ConfigReader, load_config
from quire.models.eagle import (
    D2T,
    EMBEDDING,
    INPUT_NORM,
    LM_HEAD,
    NUM_TAPS,
    SOURCES,
    T2D,
    EagleSpec,
    build_eagle,
    build_fuse,
    flat_config,
    read_eagle,
    usual_taps,
)
from quire.models.medusa import (
    build_medusa_head,
    has_biases,
    head_tensors,
    num_heads_in,
    read_medusa,
)
from quire.program.declarations import Weight
from quire.program.forms import IdSource
from quire.program.ops import Embed, Linear
from quire.program.program import Program
from quire.program.taps import HEAD_INPUT, num_layers_of, with_head_input
from quire.program.tensors import DType
from quire.weights.binding import bind
from quire.weights.checkpoint import (
    HEADS_FILE,
    PICKLE_SUFFIXES,
    SINGLE_FILE,
    Checkpoint,
    open_checkpoint,
)
from quire.weights.chosen_tensors import ChosenTensors
from quire.weights.safetensors import TABLE_TYPES

MAX_LISTED = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Fuse:
    """Makes what a head reads of the target's hidden states."""

    program: Program
    checkpoint: Checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadFiles:
    """Heads that fit the target.

    programs, checkpoints: of the heads, those of later drafts last. tapped_layers: the layers of
    the target that are read, of all rows; empty: what its head reads, of rows that sample (see
    quire/program/taps.py). fuse: None: heads read these as they are. feeds_back: further drafts are
    computed from the hidden state that the head left, by the same head. vocabulary: the token ids
    of the logits; None: all. max_positions: how far the heads count.
    """

    programs: tuple[Program, ...]
    checkpoints: tuple[Checkpoint, ...]
    tapped_layers: tuple[int, ...] = ()
    fuse: Fuse | None = None
    feeds_back: bool = False
    vocabulary: NDArray[np.int32] | None = None
    max_positions: int

    @property
    def has_cache(self) -> bool:
        """Whether heads attend to rows before, so that they have a KV cache of their own."""
        return any(program.caches for program in self.programs)

    @property
    def all_programs(self) -> tuple[Program, ...]:
        """The programs of the heads, and of what fuses hidden states."""
        return self.programs if self.fuse is None else (*self.programs, self.fuse.program)

    @property
    def all_checkpoints(self) -> tuple[Checkpoint, ...]:
        """The tensors of all_programs."""
        return self.checkpoints if self.fuse is None else (*self.checkpoints, self.fuse.checkpoint)


def read_heads(
    kind: HeadName, folder: Path, program: Program, target: Checkpoint | None, dtype: DType
) -> HeadFiles:
    """Return the heads in `folder`, compared with the target's `program` and its checkpoint.

    target: None where no weights are read: the program then lacks the target's embedding. Raises
    ModelError for heads of another model, ConfigError and WeightsError for damaged ones.
    """
    where = folder / "config.json"
    values = load_config(where)
    _check_weights(kind, folder)
    match kind:
        case "medusa":
            config = ConfigReader(values, where=str(where))
            return _medusa(folder, config, program, dtype)
        case "eagle":
            config = ConfigReader(flat_config(values, where=str(where)), where=str(where))
            return _eagle(folder, config, program, target, dtype)
        case _:
            assert_never(kind)


def _check_weights(kind: HeadName, folder: Path) -> None:
    """Raise WeightsError where all there is are pickles, with what converts them."""
    files = sorted(file.name for file in folder.iterdir() if file.is_file())
    pickles = [name for name in files if name.endswith(PICKLE_SUFFIXES)]
    if not pickles or any(name.endswith(".safetensors") for name in files):
        return
    target = HEADS_FILE if kind == "medusa" else SINGLE_FILE
    raise WeightsError(
        f"{folder}: the weights of these {kind} heads are pickles ({', '.join(pickles[:3])}), "
        "which are rejected because loading one can run any code it contains. Convert them in that "
        "directory, with PyTorch and safetensors installed:\n"
        f'  python -c "import torch, safetensors.torch as s; s.save_file({{n: '
        f"t.contiguous().clone() for n, t in torch.load('{pickles[0]}', weights_only=True)"
        f".items()}}, '{target}')\""
    )


def _medusa(folder: Path, config: ConfigReader, program: Program, dtype: DType) -> HeadFiles:
    spec = read_medusa(config)
    has_own_file = is_present(folder / HEADS_FILE) and not is_present(folder / SINGLE_FILE)
    checkpoint = open_checkpoint(folder / HEADS_FILE if has_own_file else folder)
    names = checkpoint.names
    spec = replace(spec, has_bias=has_biases(names), num_heads=num_heads_in(spec, names))
    heads = head_tensors(spec, names, str(folder))
    width = with_head_input(program).outputs[HEAD_INPUT].width
    head = build_medusa_head(spec, hidden_size=width, vocab_size=program.vocab_size, dtype=dtype)
    problems = _differing(
        ("hidden_size", spec.hidden_size, width),
        ("vocab_size", spec.vocab_size, program.vocab_size),
    )
    for tensors in heads:
        problems += _wrong_shapes(head, checkpoint, tensors)
    _raise(folder, "medusa", program, width, problems)
    # Each has a place of its own, as the cache of packed weights goes by it.
    chosen = [
        ChosenTensors(
            folder / f"head-{number}",
            {name: (checkpoint, stored) for name, stored in tensors.items()},
        )
        for number, tensors in enumerate(heads)
    ]
    return HeadFiles(
        programs=(head,) * len(heads),
        checkpoints=tuple(chosen),
        max_positions=program.max_positions,
    )


def _eagle(
    folder: Path, config: ConfigReader, program: Program, target: Checkpoint | None, dtype: DType
) -> HeadFiles:
    checkpoint = open_checkpoint(folder)
    stored = {
        _canonical(name): name
        for name in checkpoint.names
        if not name.endswith("rotary_emb.inv_freq")  # computed from config.json
    }
    spec = read_eagle(config, stored)
    width, num_layers = program.outputs["hidden"].width, num_layers_of(program)
    problems = _differing(
        ("vocab_size", spec.vocab_size, program.vocab_size),
        ("target_hidden_size", spec.target_hidden_size, width),
    )
    taps, wrong_taps = _taps(spec, num_layers)
    problems += wrong_taps
    max_positions = min(spec.layer.max_positions, program.max_positions)
    layer = build_eagle(
        spec, vocab_size=program.vocab_size, dtype=dtype, max_positions=max_positions
    )
    fuse = build_fuse(spec, columns=NUM_TAPS * width, vocab_size=program.vocab_size, dtype=dtype)
    names = {ours: stored[name] for name, ours in spec.layer_sources.items() if name in stored}
    fuse_names = {name: stored[name] for name in spec.fuse_names if name in stored}
    problems += _unexpected(spec, stored, program)
    problems += _wrong_shapes(layer, checkpoint, names)
    problems += _wrong_shapes(fuse, checkpoint, fuse_names)
    sources: dict[str, tuple[Checkpoint, str]] = {
        ours: (checkpoint, name) for ours, name in names.items()
    }
    problems += _shared(spec, stored, program, target, sources)
    vocabulary, wrong = _vocabulary(spec, checkpoint, program.vocab_size)
    _raise(folder, "eagle", program, width, problems + wrong)
    return HeadFiles(
        programs=(layer,),
        checkpoints=(ChosenTensors(folder, sources),),
        tapped_layers=taps,
        fuse=Fuse(
            program=fuse,
            checkpoint=ChosenTensors(
                folder, {name: (checkpoint, theirs) for name, theirs in fuse_names.items()}
            ),
        ),
        feeds_back=True,
        vocabulary=vocabulary,
        max_positions=max_positions,
    )


def _taps(spec: EagleSpec, num_layers: int) -> tuple[tuple[int, ...], list[str]]:
    """Return the layers after which hidden states are read; and problems."""
    if not spec.taps:
        try:
            return usual_taps(num_layers), []
        except ModelError as error:
            return (), [str(error)]
    first = spec.first_layer_id
    return spec.taps, [
        f"layer id {first + layer} in config.json is beyond the model's {num_layers} layers; ids "
        f"from {first} to {first + num_layers - 1} are allowed there"
        for layer in spec.taps
        if layer >= num_layers
    ]


def _canonical(name: str) -> str:
    """Return a tensor's name as SafeAILab's checkpoints have it; others call the layer 0."""
    name = name.removeprefix("model.")
    return "midlayer." + name.removeprefix("layers.0.") if name.startswith("layers.0.") else name


def _unexpected(spec: EagleSpec, stored: Mapping[str, str], program: Program) -> list[str]:
    """Return which tensors the head has and should not have, and which it lacks.

    stored: the names in the checkpoint, by canonical ones.
    """
    needed = (*spec.layer_sources, *spec.fuse_names)
    # Others skip the tensor where config.json says that nothing is normed with it.
    allowed = {*needed, D2T, T2D, INPUT_NORM}
    optional = {EMBEDDING} | ({LM_HEAD} if _has_all_tokens(spec, stored, program) else set())
    return [
        f"{show(name)} is no tensor of an EAGLE-3 head"
        for canonical, name in stored.items()
        if canonical not in allowed
    ] + [f"{name} is missing" for name in needed if name not in stored and name not in optional]


def _has_all_tokens(spec: EagleSpec, stored: Mapping[str, str], program: Program) -> bool:
    """Return whether the logits of the head are those of the model's tokens, in order."""
    return D2T not in stored and spec.layer.vocab_size == program.vocab_size


def _shared(
    spec: EagleSpec,
    stored: Mapping[str, str],
    program: Program,
    target: Checkpoint | None,
    sources: dict[str, tuple[Checkpoint, str]],
) -> list[str]:
    """Add to `sources` what the head has in common with the target: its embedding, and its head
    where both know the same tokens. Return problems."""
    problems = []
    shared = {EMBEDDING: ("embedding", _embedding)}
    if _has_all_tokens(spec, stored, program):
        shared[LM_HEAD] = ("head", _head)
    for name, (what, find) in shared.items():
        if name in stored:
            continue
        weight = find(program)
        if target is not None:
            bound = bind(program, target).stored_name(weight.parts[0])
            sources[SOURCES[name]] = target, bound
        if weight.columns != spec.layer.hidden_size:
            problems.append(
                f"{name} is missing, and the model's {what} has {weight.columns} columns, not "
                f"the {spec.layer.hidden_size} of hidden_size"
            )
    return problems


def _embedding(program: Program) -> Weight:
    """Return the target's embedding of tokens."""
    for op in program.segments["trunk"]:
        if isinstance(op, Embed) and op.ids is IdSource.TOKENS:
            return program.weights[op.weight]
    raise ModelError(f"{program.name}: the model looks up no token embeddings")


def _head(program: Program) -> Weight:
    """Return the target's product onto the vocabulary."""
    logits = program.outputs["logits"].buffer
    for op in program.segments["head"]:
        if isinstance(op, Linear) and op.y.buffer == logits:
            return program.weights[op.weight]
    raise ModelError(f"{program.name}: no product writes the logits")


def _vocabulary(
    spec: EagleSpec, checkpoint: Checkpoint, vocab_size: int
) -> tuple[NDArray[np.int32] | None, list[str]]:
    """Return the token ids of the head's logits, None if they are all in order; and problems."""
    num_ids = spec.layer.vocab_size
    if D2T not in checkpoint.names:
        if num_ids == spec.vocab_size:
            return None, []
        return None, [f"{D2T} is missing; draft_vocab_size {num_ids} needs it"]
    table = checkpoint.tensor(D2T)
    if table.dtype not in TABLE_TYPES or table.shape != (num_ids,):
        found = f"{table.dtype} {list(table.shape)}"
        return None, [f"{D2T} is {found}; i64 or i32 [{num_ids}] is needed"]
    ids = table.whole_numbers() + np.arange(num_ids)
    if ((ids < 0) | (ids >= vocab_size)).any() or len(np.unique(ids)) != num_ids:
        return None, [f"{D2T} does not lead to {num_ids} different ids from 0 to {vocab_size - 1}"]
    problems = []
    if T2D in checkpoint.names:
        mask = checkpoint.tensor(T2D)
        is_known = np.zeros(vocab_size, np.bool_)
        is_known[ids] = True
        fits = mask.dtype == "bool" and mask.shape == (vocab_size,)
        if not fits or not np.array_equal(mask.raw != 0, is_known):
            problems.append(f"{T2D} names other tokens than {D2T}")
    return ids.astype(np.int32), problems


def _differing(*values: tuple[str, int, int]) -> list[str]:
    """Return what config.json says otherwise than the model; 0: nothing."""
    return [
        f"{name} in config.json is {found}; the model's is {needed}"
        for name, found, needed in values
        if found not in (0, needed)
    ]


def _wrong_shapes(program: Program, checkpoint: Checkpoint, names: Mapping[str, str]) -> list[str]:
    """Return tensors of other shapes than `program` needs. names: the stored ones, by its own."""
    needed = program.source_shapes()
    return [
        f"{stored} is {list(checkpoint.describe(stored)[1])}; {list(needed[name])} is needed"
        for name, stored in names.items()
        if checkpoint.describe(stored)[1] != needed[name]
    ]


def _raise(folder: Path, kind: HeadName, program: Program, width: int, problems: list[str]) -> None:
    if not problems:
        return
    listed = "".join(f"\n  - {problem}" for problem in problems[:MAX_LISTED])
    if len(problems) > MAX_LISTED:
        listed += f"\n  - and {len(problems) - MAX_LISTED} more"
    reads = f"{NUM_TAPS} hidden states of {width}" if kind == "eagle" else f"hidden size {width}"
    raise ModelError(
        f"{folder}: these {kind} heads do not fit {program.name} ({reads}, {program.vocab_size} "
        f"token ids):{listed}\ntake heads that were trained for this model, or train some with "
        f"`python -m quire.train.{kind}`"
    )
