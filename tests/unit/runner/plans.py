"""Plans from compact descriptions, and a runner of eight slots to submit them to."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.base.records import Admission, StepPlan
from quire.base.sampling_params import SamplingParams
from quire.runner.model_runner import ModelRunner

BLOCK_SIZE = 4


def runner_of(executor: Any, **settings: Any) -> ModelRunner:
    sizes = {"num_slots": 8, "max_model_len": 64, "block_size": BLOCK_SIZE, "max_samples": 64}
    return ModelRunner(executor, **{**sizes, **settings})


def ints(*values: int) -> NDArray[np.int32]:
    return np.array(values, np.int32)


def admission_of(slot: int, token_ids: list[int], **settings: Any) -> Admission:
    stop_ids = settings.pop("stop_ids", ())
    num_prompt_tokens = settings.pop("num_prompt_tokens", len(token_ids))
    return Admission(
        slot=slot,
        request_id=f"r{slot}",
        stream=settings.pop("stream", 0),
        token_ids=np.array(token_ids, np.int32),
        num_prompt_tokens=num_prompt_tokens,
        stop_ids=stop_ids,
        sampling=SamplingParams(**{"seed": 7, **settings}),
    )


def plan_of(
    step: int,
    rows: list[tuple[int, int, int, int]],
    *,
    admissions: tuple[Admission, ...] = (),
    blocks: dict[int, list[int]] | None = None,
    store_from: list[int] | None = None,
    **more: Any,
) -> StepPlan:
    """rows: (slot, start, count, sampled positions). blocks: the slot's table from column 0 on."""
    deltas = [
        (slot, column, block)
        for slot, ids in (blocks or {}).items()
        for column, block in enumerate(ids)
    ]
    slots, columns, ids = zip(*deltas, strict=True) if deltas else ((), (), ())
    return StepPlan(
        step=step,
        admissions=admissions,
        table_slots=ints(*slots),
        table_columns=ints(*columns),
        table_blocks=ints(*ids),
        slots=ints(*(row[0] for row in rows)),
        starts=ints(*(row[1] for row in rows)),
        counts=ints(*(row[2] for row in rows)),
        sample_counts=ints(*(row[3] for row in rows)),
        store_from=ints(*(store_from or [row[1] for row in rows])),
        **more,
    )
