"""Measure a profile: step times of a real engine as JSON, to be simulated on any machine.

Made-up steps are timed through the engine's own runner with the given settings: chunks from
position 0, rows of one token, and both at depth. A short run of the whole loop then measures what
the engine adds to each step. Only measuring reads a clock.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from quire.base.clock import Clock
from quire.base.errors import SettingError
from quire.base.records import NO_INTS, Request, StepPlan, StepResult
from quire.base.report import Field
from quire.base.sampling_params import SamplingParams
from quire.config.groups import EngineConfig
from quire.engine.assembly.assemble import Engine, assemble
from quire.engine.assembly.warm_up import made_up_plan, measure_cost
from quire.engine.core import EngineCore, Runner
from quire.obs.report import Progress
from quire.runner.handle import Handle
from quire.runner.model_runner import ModelRunner
from quire.scheduler.cost.step_cost import LinearCost
from quire.scheduler.limits import SchedulerLimits
from quire.sim.cost import MeasuredCost, Points
from quire.sim.machine import Machine, planned_program
from quire.sim.ranks import token_bytes_of

VERSION = 1
_GREEDY = SamplingParams(temperature=0.0, seed=0)
_TIMES = 5
_DEPTH = 512
# Limit of cached tokens over all rows at depth: filling the cache costs as much as a prompt.
_DEEP_TOKENS = 8192
_LOOP_PROMPT, _LOOP_OUTPUT = 48, 24


def measure_machine(config: EngineConfig, *, progress: Progress | None = None) -> dict[str, Any]:
    """Measure an engine of this config and return its profile, ready for JSON.

    Raises ModelError, CapacityError or SettingError as an engine's start does.
    """
    progress = progress or Progress()
    progress.say("packing the weights")
    clock = Clock()
    engine = assemble(config, clock=clock, report=_ignore)
    runner, card = engine.core.runner, engine.card
    assert isinstance(runner, ModelRunner)
    with closing(runner):
        measured = _StepTimer(runner, engine, clock, progress).measure()
        limits = SchedulerLimits(
            max_num_seqs=card.max_num_seqs,
            max_num_batched_tokens=engine.step_tokens,
            max_model_len=card.max_model_len,
        )
        linear = measure_cost(runner, limits, card.num_blocks, clock)
        progress.say("measuring the loop")
        cost = MeasuredCost(**_points(measured))
        measured["loop_ms"] = _loop_ms(engine, cost, clock)
        token_bytes = token_bytes_of(config, planned_program(config))
    progress.clear()
    return {
        "profile_version": VERSION,
        "name": card.name,
        "dtype": card.dtype,
        "quantization": card.quantization,
        "recipe": card.recipe,
        "max_model_len": card.max_model_len,
        "step_tokens": engine.step_tokens,
        "num_layers": engine.num_layers,
        "ranks": config.executor.ranks_of_stage,
        "context_ranks": config.executor.context_parallel_size,
        "token_bytes": token_bytes,
        **measured,
        "linear": asdict(linear),
    }


def read_machine(path: Path) -> Machine:
    """Return the machine of a profile file. Raises SettingError where it is not one."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise SettingError(
            f"{path}: the profile cannot be read: {reason}; `quire profile --json >FILE` writes one"
        ) from error
    return machine_of(found, where=str(path))


def machine_of(profile: Mapping[str, Any], *, where: str = "the profile") -> Machine:
    """Return the machine of a profile. Raises SettingError for missing or invalid fields."""
    try:
        if profile["profile_version"] != VERSION:
            raise SettingError(
                f"{where} has version {profile['profile_version']}, this is for {VERSION}; measure "
                "it again"
            )
        return Machine(
            name=str(profile["name"]),
            cost=MeasuredCost(**_points(profile)),
            linear=LinearCost(**{name: float(v) for name, v in profile["linear"].items()}),
            token_bytes=int(profile["token_bytes"]),
            max_model_len=int(profile["max_model_len"]),
            step_tokens=int(profile["step_tokens"]),
            num_layers=int(profile.get("num_layers", 0)),
            about={
                **{name: profile[name] for name in ("dtype", "quantization", "recipe")},
                "ranks": int(profile.get("ranks", 1)),
                "context_ranks": int(profile.get("context_ranks", 1)),
            },
        )
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise SettingError(
            f"{where} is no profile of an engine's steps ({type(error).__name__}: {error}); "
            "quire simulate --save-profile writes one"
        ) from error


def _points(profile: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of MeasuredCost."""
    found: dict[str, Any] = {
        name: tuple((int(at), float(ms)) for at, ms in profile[name])
        for name in ("chunk_ms", "rows_ms", "read_ms")
    }
    found["pair_ms"] = float(profile["pair_ms"])
    found["loop_ms"] = float(profile.get("loop_ms", 0.0))
    return found


class _StepTimer:
    """Times made-up steps of one engine."""

    def __init__(
        self, runner: ModelRunner, engine: Engine, clock: Clock, progress: Progress
    ) -> None:
        self._runner = runner
        self._clock = clock
        self._progress = progress
        card = engine.card
        self._block_size = card.block_size
        self._positions = min(card.max_model_len, card.num_blocks * card.block_size)
        self._step_tokens = min(engine.step_tokens, self._positions - 1)
        self._max_rows = min(card.max_num_seqs, self._step_tokens, card.num_blocks)
        self._num_blocks = card.num_blocks

    def measure(self) -> dict[str, Any]:
        """Return chunk_ms, rows_ms, pair_ms and read_ms (see MeasuredCost)."""
        chunk_ms = tuple((n, self._median_ms([n], 0)) for n in _sizes(self._step_tokens))
        rows_ms = tuple((n, self._median_ms([1] * n, 0)) for n in _sizes(self._max_rows))
        depth = max(min(_DEPTH, self._positions - self._step_tokens - 1), 0)
        read_ms: Points = ((1, 0.0),)
        pair_ms = 0.0
        if depth:
            rows = {1, min(8, self._max_rows), self._max_rows}
            read_ms = tuple((n, self._read_ms(n, min(depth, self._room(n)))) for n in sorted(rows))
            count = self._step_tokens
            self._fill(1, depth)
            deeper_ms = self._median_ms([count], depth) - chunk_ms[-1][1]
            pair_ms = max(deeper_ms, 0.0) / (count * depth)
        return {
            "chunk_ms": chunk_ms,
            "rows_ms": rows_ms,
            "read_ms": read_ms,
            "pair_ms": pair_ms,
        }

    def _room(self, num_rows: int) -> int:
        """Return how many cached tokens each of num_rows rows can have."""
        own_blocks = self._num_blocks // num_rows
        return min(_DEEP_TOKENS // num_rows, own_blocks * self._block_size) - 1

    def _read_ms(self, num_rows: int, depth: int) -> float:
        if depth < 1:
            return 0.0
        self._fill(num_rows, depth)
        deep_ms = self._median_ms([1] * num_rows, depth)
        shallow_ms = self._median_ms([1] * num_rows, 0)
        return max(deep_ms - shallow_ms, 0.0) / (num_rows * depth)

    def _fill(self, num_rows: int, depth: int) -> None:
        """Write keys and values of `depth` tokens for each row.

        Reads of unwritten pages would all hit one zero page in the processor's caches.
        """
        for start in range(0, depth, self._step_tokens):
            count = min(self._step_tokens, depth - start)
            self._run(made_up_plan([count], [start], *self._what()))
        columns, width = self._blocks(depth), self._blocks(depth + 1)
        if num_rows == 1:
            return
        others = np.arange(1, num_rows, dtype=np.int32)[:, None] * width
        first = np.arange(columns, dtype=np.int32)
        self._run(
            replace(
                made_up_plan([1] * num_rows, [depth] * num_rows, *self._what()),
                copy_from=np.tile(first, num_rows - 1),
                copy_to=(others + first).reshape(-1),
            )
        )

    def _blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)

    def _median_ms(self, counts: Sequence[int], start: int) -> float:
        """Return the median time of a step without admissions."""
        self._progress.say(
            f"measuring a step: {len(counts)} rows, {sum(counts)} tokens, at {start}"
        )
        plan = made_up_plan(counts, [start] * len(counts), *self._what())
        self._run(plan)
        steady = replace(
            plan, admissions=(), table_slots=NO_INTS, table_columns=NO_INTS, table_blocks=NO_INTS
        )
        return statistics.median(self._run(steady) for _ in range(_TIMES))

    def _what(self) -> tuple[int, SamplingParams]:
        return self._block_size, _GREEDY

    def _run(self, plan: StepPlan) -> float:
        began_ms = self._clock.now_ms()
        self._runner.collect(self._runner.submit(plan))
        return self._clock.now_ms() - began_ms


def _sizes(highest: int) -> list[int]:
    """Return 1, 2, 4, 8, 16, then each power of two and the half way to it, up to `highest`."""
    sizes = {highest}
    size = 1
    while size < highest:
        sizes |= {size, min(size * 3 // 2, highest)} if size >= 16 else {size}
        size *= 2
    return sorted(sizes)


def _loop_ms(engine: Engine, cost: MeasuredCost, clock: Clock) -> float:
    """Return the time per step beyond the prediction when the whole loop runs requests."""
    card, plans = engine.card, list[StepPlan]()
    scheduler = engine.core.scheduler
    core = EngineCore(
        scheduler, _PlanRecorder(engine.core.runner, plans), plans_in_flight=1, report=_ignore
    )
    output = min(_LOOP_OUTPUT, max(card.max_model_len // 2, 1))
    prompt = min(_LOOP_PROMPT, card.max_model_len - output)
    fit = card.num_blocks // -(-(prompt + output) // card.block_size)
    for number in range(max(min(8, card.max_num_seqs, fit), 1)):
        name = f"measured-{number}"
        core.add(
            (
                Request(
                    request_id=name,
                    group_id=name,
                    stream=0,
                    prompt_ids=np.full(prompt, number % card.vocab_size, np.int32),
                    sampling=_GREEDY,
                    stop_ids=(),
                    max_total_tokens=prompt + output,
                    arrival_ms=clock.now_ms(),
                ),
            )
        )
    began_ms = clock.now_ms()
    while core.has_work:
        core.step(clock.now_ms)
    wall_ms = clock.now_ms() - began_ms
    predicted_ms = sum(cost.step_ms(plan) for plan in plans)
    return max(wall_ms - predicted_ms, 0.0) / max(len(plans), 1)


class _PlanRecorder:
    """A runner that records the plans it passes on."""

    def __init__(self, runner: Runner, plans: list[StepPlan]) -> None:
        self._runner = runner
        self._plans = plans

    def submit(self, plan: StepPlan) -> Handle:
        """Record the plan and pass it on."""
        self._plans.append(plan)
        return self._runner.submit(plan)

    def collect(self, handle: Handle) -> StepResult:
        """See ModelRunner."""
        return self._runner.collect(handle)

    def close(self) -> None:
        """Do nothing; the owner of the inner runner closes it."""


def _ignore(what: str, **fields: Field) -> None:
    """Ignore reports; a failed step fails the measurement."""
