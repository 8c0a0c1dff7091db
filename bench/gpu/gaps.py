"""Measure the cost of a launch within a graph, with small kernels that depend on each other.

One after the other, as the engine launches them; and overlapped (programmatic dependent launch),
where a kernel is placed on the multiprocessors while the previous one ends, and waits there for its
memory. A layer of a step of one token is about ten launches. The engine does not overlap launches
yet: this section shows whether it should, and whether the values read are right.
"""

from __future__ import annotations

from functools import partial
from itertools import cycle, islice

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from bench.gpu.stage import Stage

PROGRAMS, COLUMNS, LAUNCHES = 132, 128, 400


@triton.jit
def _passed_on(x, y, programs, COLUMNS: tl.constexpr, IS_OVERLAPPED: tl.constexpr):
    """Set y's row of this program to x's row of the next program + 1."""
    if IS_OVERLAPPED:
        gdc_wait()
        gdc_launch_dependents()
    program, columns = tl.program_id(0), tl.arange(0, COLUMNS)
    row = tl.load(x + (program + 1) % programs * COLUMNS + columns)
    tl.store(y + program * COLUMNS + columns, row + 1.0)


def gaps(stage: Stage) -> None:
    """Report seconds per launch in both ways, and whether the values passed on are right."""
    launches = 4 if stage.is_dry else LAUNCHES
    for title in ("plain", "overlapped")[: 1 if stage.is_dry else 2]:
        rooms = [torch.zeros(PROGRAMS, COLUMNS, device=stage.device) for _ in "xy"]
        launch = partial(_launch, is_overlapped=title == "overlapped")
        works = [partial(launch, *pair) for pair in islice(cycle((rooms, rooms[::-1])), launches)]
        seconds = stage.replayed_seconds(works)
        found = {"seconds_a_launch": seconds, "launches": launches}
        if stage.is_on_card or stage.is_dry:
            # An even number of launches in each run: the last one wrote the first buffer.
            found["is_right"] = bool((rooms[0] == rooms[1] + 1).all()) and float(rooms[0].max()) > 0
        stage.report(title, found)


def _launch(x: torch.Tensor, y: torch.Tensor, *, is_overlapped: bool) -> None:
    options = {"launch_pdl": True} if is_overlapped else {}
    _passed_on[(PROGRAMS,)](
        x, y, PROGRAMS, COLUMNS=COLUMNS, IS_OVERLAPPED=is_overlapped, num_warps=4, **options
    )
