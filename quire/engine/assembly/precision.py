"""The precision of a model's weights, as it was asked for: where settings meet the program.

Knows the settings' names and what a model's file says of itself; the rewrite is
quire/program/quantize.py. Always holds: weights that their file has quantized are kept in the
precision made for its types, or multiplied out; they are never brought to another one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from quire.base.errors import SettingError
from quire.base.log import Log
from quire.program.declarations import Weight, WeightForm
from quire.program.program import Program
from quire.program.quantize import AUTO, quantize
from quire.quant.scheme import ACTIVATION_GROUP
from quire.weights.checkpoint import Checkpoint, lacks_weights, open_checkpoint
from quire.weights.safetensors import raise_problems

# Q4_0 is 4 bits with a scale for 32 elements, and so is int4-g32: codes stay, only scales are
# rounded (to bf16, 0.2 % of an element at most). All others become 8 bits with a scale per row;
# that error is small compared with the loss of the original rounding. docs/gguf.md has the numbers.
FOUR_BITS = "Q4_0"
CLOSEST_PRECISION: Mapping[bool, str] = {True: "int4-g32", False: "int8"}
# Fp8 stays what it is: the codes and their scales.
FP8, FP8_BLOCK, FP8_STATIC = "fp8", "fp8-block", "fp8-static"
# Share of a weight's rows that 8 bits may be too coarse for before it is worth a warning.
MAX_COARSE_SHARE = 0.01
MAX_NAMED = 6


def weights_if_there(model: Path) -> Checkpoint | None:
    """Return the model's checkpoint, or None where weights are absent: see lacks_weights.

    For callers that count or compare and load nothing. Raises WeightsError for damaged files.
    """
    return None if lacks_weights(model) else open_checkpoint(model)


def with_precision(
    program: Program,
    quantization: str,
    checkpoint: Checkpoint | None,
    *,
    head: str = AUTO,
    keep: Sequence[str] = (),
    static: bool = False,
) -> Program:
    """Return the program with the weights' precision that the settings ask for.

    quantization: a scheme, "none", or "auto": as the checkpoint has them (None: it is not there
    yet). static: its config.json says that it fixes the scales of activations; where fp8 is asked
    for by name each token has its own. Raises SettingError for what is no precision, a rule that
    matches nothing, and what would quantize weights a second time; WeightsError where scales that
    are said to be fixed are not there.
    """
    types = {} if checkpoint is None else _types_of_products(program, checkpoint)
    stored = {
        name: _as_stored(program.weights[name], found, static=static)
        for name, found in types.items()
    }
    made = quantize(program, quantization, head=head, keep=keep, stored=stored)
    twice = {
        kind
        for name, found in types.items()
        for kind in found
        if kind and not _holds(made.weights[name].scheme, stored.get(name, ""))
    }
    if twice:
        where = checkpoint.path if checkpoint is not None else program.name
        raise SettingError(
            f"{where}: its weights are quantized already ({', '.join(sorted(twice))}); rounding "
            "them again would lose more than either does: leave --quantization, --head-precision "
            "and --keep out, let them say none, or take the model's original checkpoint"
        )
    if checkpoint is not None:
        _check_input_scales(made, checkpoint)
    return made


def warn_of_coarse(log: Log, program: Program, coarse_rows: Mapping[str, int]) -> None:
    """Say which weights 8 bits break, and the setting that keeps these in their own precision.

    coarse_rows: as executors count them. A few such rows are usual and cost little.
    """
    names = [
        name
        for name, count in coarse_rows.items()
        if count > MAX_COARSE_SHARE * program.weights[name].rows
    ]
    if not names:
        return
    shown = [f"{name} ({coarse_rows[name]} of {program.weights[name].rows} rows)" for name in names]
    more = len(names) - MAX_NAMED
    log.warning(
        "8 bits are too coarse for some weights: a few elements dwarf the others of their rows",
        weights=", ".join(shown[:MAX_NAMED]) + (f" and {more} more" if more > 0 else ""),
        instead=" ".join(f"--keep {name}=none" for name in names[:MAX_NAMED]),
    )


def _holds(scheme: str, stored: str) -> bool:
    """Return whether a scheme leaves what is stored in another as it is. Fixed scales of
    activations may be left unused."""
    return scheme in ("", stored) or (stored == FP8_STATIC and scheme == FP8)


def _check_input_scales(program: Program, checkpoint: Checkpoint) -> None:
    """Raise WeightsError where a weight's scheme counts on fixed scales that are not there."""
    problems = []
    for weight in program.weights.values():
        if weight.scheme != FP8_STATIC:
            continue
        stored = {part.source: checkpoint.fp8(part.source) for part in weight.parts}
        lacking = [name for name, of in stored.items() if of is not None and not of.input_scale]
        if lacking:
            names = ", ".join(name.removesuffix("weight") + "input_scale" for name in lacking)
            others = len(stored) - len(lacking)
            beside = f"; {others} of {len(stored)} parts of {weight.name} have theirs"
            problems.append(f"{names} is missing{beside if others else ''}")
    raise_problems(
        f"{checkpoint.path}: config.json says that scales of activations are fixed (static), and "
        f"some are not there; fetch the model anew, or give --quantization {FP8}, by which each "
        "token has a scale of its own",
        problems,
    )


def _as_stored(weight: Weight, types: set[str], *, static: bool) -> str:
    """Return the scheme that is nearest to what a weight's parts are stored in, "" where there is
    none: parts of plain numbers, of several kinds of fp8, or that begin inside a block."""
    if not types or "" in types:
        return ""
    if not types & {FP8, FP8_BLOCK}:
        return CLOSEST_PRECISION[types == {FOUR_BITS}]
    is_aligned = all(part.first_row % ACTIVATION_GROUP == 0 for part in weight.parts) and all(
        part.rows % ACTIVATION_GROUP == 0 for part in weight.parts[:-1]
    )
    kind = next(iter(types)) if len(types) == 1 else ""
    if kind == FP8 and static:
        return FP8_STATIC
    return "" if kind == FP8_BLOCK and not is_aligned else kind


def _types_of_products(program: Program, checkpoint: Checkpoint) -> dict[str, set[str]]:
    """Return the types of blocks that each matrix is made of, "" where a part is of plain
    numbers."""
    held = set(checkpoint.names)
    return {
        weight.name: {
            checkpoint.block_type(part.source) for part in weight.parts if part.source in held
        }
        for weight in program.weights.values()
        if weight.form is WeightForm.MATRIX
    }
