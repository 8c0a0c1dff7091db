"""Products split by their inputs: the weights of a rank under `--tp-mode fast`.

A rank has some columns of the weight and multiplies them by the columns of the input that it has
itself computed. Its product is a part of each output, and AllReduce adds the parts up in the order
of ranks. Two exchanges a layer take the place of four, and the bits depend on the degree. Integers
are scaled by the rank's own columns.

Knows weights only; shard.py decides where. Always holds: the columns of all ranks are those of the
whole weight, each once.
"""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum

from quire.base.errors import SettingError
from quire.program.declarations import Weight


class TpMode(StrEnum):
    """exact: no sum is split, the bits are those of one process. fast: products by inputs."""

    EXACT = "exact"
    FAST = "fast"


def with_columns(weight: Weight, start: int, end: int) -> Weight:
    """Return columns [start, end) of a weight. Raises SettingError inside a group of integers."""
    group = 0 if weight.ints is None else weight.ints.group
    if group and (start % group or (end % group and end != weight.columns)):
        raise SettingError(
            f"tp_mode is fast, and {weight.name} has integers in groups of {group} columns, which "
            f"its share of columns {start} to {end} would divide; take --tp-mode exact, "
            "--quantization int8 or none"
        )
    parts = tuple(
        replace(part, first_column=start, of_columns=weight.columns) for part in weight.parts
    )
    return replace(weight, parts=parts, columns=end - start)
