"""Ranks of one thread against threads of one process: steps in pairs, and the share of exchanges.

    python -m bench.parallel [--shape qwen3-0.6b] [--degree 2] [--precision none] [--write]
                             [--experts whole|placed] [--mode exact|fast] [--compare threads|modes]
    python -m bench.parallel --stages 2 --degree 1 [--write]
    python -m bench.parallel --context 2 --degree 1 [--depth 4096] [--write]
    python -m bench.parallel --cells all [--seconds 4] [--write]

Both executors have the same number of threads in all, are loaded at once, and run the same step in
turn, the order changing from pair to pair; their logits must be equal bit for bit (other than with
--mode fast). --experts: whole experts on ranks, or placed by the loads of the steps before, with a
copy for each rank; each rank's share of the pairs is printed. For each step:
the median times, the median ratio within pairs (above 1: ranks are faster), the share of rank 0's
time in exchanges, waiting included, and the bytes it receives, counted and by the cost model.

Ranks alone, without --stages or --context, are then measured in both modes, in pairs again: "modes"
has the times of --tp-mode exact and fast, the median ratio (above 1: fast is faster), the share of
exchanges and the bytes received in each. --compare threads leaves this out, --compare modes does
nothing else.

With --stages the ranks are stages of a pipeline, of `degree` ranks each. A step alone passes them
one after the other, so that it cannot be faster; in "micro_batches" the rows of a step are divided
over as many steps in flight as stages, against one process that computes all of them at once.
bubble is the share of the time in which the last stage waits for rows.

With --context ranks divide the positions of the KV cache, beside the `degree` that divides heads;
steps have few rows at a large depth. The exchange of parts is a part of attention, so that its time
is in share_of_attention.

With --cells, a few small layouts one after the other (CELLS: products, both modes, experts that are
split, whole and placed, stages with micro-batches of a dense model and of a mixture), for two
cores: the measurement of a step ends after --seconds, which keeps all of them within five minutes,
and one layout with its defaults within four. Progress is shown on standard error.

Beside it, labelled as computed and measured nowhere: the same program on other machines, from their
rates, with exchanges of columns (--tp-mode exact), with sums in the order of ranks (fast), with
sums in any order (two ring all-reduces a layer, which would not keep the bits of a degree), and as
stages of a pipeline. Writes
bench/results/parallel.json, pipeline.json, context.json or parallel_cells.json with --write.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from bench.checkpoints import SHAPES, random_checkpoint
from quire.base.errors import SettingError
from quire.bench.machine import machine_card
from quire.config.machine import num_usable_cores
from quire.execute.executor import ExecutorOptions, StepLimits
from quire.execute.native import NativeExecutor
from quire.models.registry import build_program, open_model
from quire.program.batch import CacheRows, ForwardBatch
from quire.program.comm_ops import AllGather, AllReduce, num_exchanges
from quire.program.cost import StepShape
from quire.program.declarations import PIECE_POSITIONS
from quire.program.expert_parallel import ExpertPlan, balance
from quire.program.ops import Attention
from quire.program.program import Program
from quire.program.quantize import quantize
from quire.program.row_parallel import TpMode
from quire.program.shard import shard
from quire.program.split import split
from quire.program.stage_ops import Recv
from quire.program.tensors import DType
from quire.ranks.executor_class import RankedExecutorClass
from quire.ranks.pipeline_class import PipelineExecutorClass
from quire.ranks.rank_executor import MirroredExecutor
from quire.ranks.stage_executor import PipelineExecutor
from quire.weights.checkpoint import Checkpoint, open_checkpoint

RESULTS = Path(__file__).parent / "results"
BLOCK_SIZE, DEPTH = 16, 512
PREFILL_TOKENS = 256
ROUNDS = 8  # of micro-batches, one after the other without a gap
DECODED_ROWS = (1, 4, 16, 64)
# With context parallelism: fewer rows, with more positions before them.
CONTEXT_ROWS, CONTEXT_DEPTH = (1, 4), 4096
# Between two steps: threads of the executor that waits have gone to sleep.
PAUSE_S = 0.005


@dataclass(frozen=True)
class Described:
    """A machine by its rates. link_gb_per_s: what a rank receives. exchange_us: of one exchange."""

    name: str
    degree: int
    rank_gb_per_s: float
    link_gb_per_s: float
    exchange_us: float


CELLS: dict[str, dict[str, Any]] = {
    "products": {"shape": "qwen3-0.1b"},
    "modes": {"shape": "qwen3-0.1b", "compare": "modes"},
    "experts split": {"shape": "qwen3-moe-0.2b"},
    "experts whole": {"shape": "qwen3-moe-0.2b", "experts": "whole"},
    "experts placed": {"shape": "qwen3-moe-0.2b", "experts": "placed"},
    "stages": {"shape": "qwen3-0.1b", "degree": 1, "stages": 2},
    "stages of a mixture": {"shape": "qwen3-moe-0.2b", "degree": 1, "stages": 2},
}
# Of each step, and of each step in a cell.
STEP_SECONDS, CELL_SECONDS = 12.0, 4.0
# A median of fewer pairs says little, however long they take.
MIN_PAIRS = 3


class Pairs:
    """Counts the pairs of a step until there are enough or the time is over; shows progress."""

    def __init__(self, what: str, pairs: int, seconds: float | None) -> None:
        self._what = what
        self._pairs = pairs
        self._seconds = seconds

    def __iter__(self) -> Iterator[int]:
        """Yield -2 and -1, which warm up, then 0, 1, ..."""
        began_s = time.perf_counter()
        for number in range(-2, self._pairs):
            is_over = self._seconds is not None and time.perf_counter() - began_s > self._seconds
            if is_over and number >= MIN_PAIRS:
                break
            yield number
        took_s = time.perf_counter() - began_s
        print(f"{self._what}: {took_s:.1f} s", file=sys.stderr, flush=True)


DESCRIBED = (
    Described("2 sockets of 64 cores", 2, 300.0, 60.0, 3.0),
    Described("8 GPUs (H100, NVLink)", 8, 3000.0, 400.0, 10.0),
)


def step_batch(
    rows: int,
    tokens: int,
    vocab_size: int,
    seed: int,
    *,
    depth: int = DEPTH,
    block_size: int = BLOCK_SIZE,
) -> ForwardBatch:
    """Return a step of `rows` sequences that compute `tokens` tokens each after `depth` others."""
    rng, columns = np.random.default_rng(seed), (depth + tokens) // block_size + 1
    positions = np.tile(np.arange(depth, depth + tokens, dtype=np.int32), rows)
    tables = np.arange(rows * columns, dtype=np.int32).reshape(rows, columns)
    owner = np.repeat(np.arange(rows), tokens)
    slots = tables[owner, positions // block_size] * block_size + positions % block_size
    starts = np.arange(rows + 1, dtype=np.int32) * tokens
    return ForwardBatch(
        token_ids=rng.integers(0, vocab_size, rows * tokens).astype(np.int32),
        positions=positions,
        rope_positions=positions,
        caches=(CacheRows(kv_slots=slots.astype(np.int32), block_tables=tables),),
        seq_starts=starts.astype(np.int32),
        sample_rows=(starts[1:] - 1).astype(np.int32),
    )


def run_step(executor: NativeExecutor, batch: ForwardBatch) -> tuple[float, bytes]:
    """Return the milliseconds of a step, and its logits."""
    time.sleep(PAUSE_S)
    rows = len(batch.sample_rows)
    began_s = time.perf_counter()
    executor.run_trunk(batch, head_rows=rows)
    logits = executor.run_head(batch, 0, rows)
    return 1e3 * (time.perf_counter() - began_s), logits.tobytes()


def received_by(ranks: MirroredExecutor) -> int:
    """Return the bytes that rank 0 has received from other ranks so far."""
    received = ranks.group.native.received_bytes
    if isinstance(ranks, PipelineExecutor) and ranks.links.source is not None:
        received += ranks.links.source.native.received_bytes
    return received


def in_pairs(
    whole: NativeExecutor,
    ranks: MirroredExecutor,
    rows: int,
    tokens: int,
    pairs: Pairs,
    mode: TpMode,
    depth: int,
    block_size: int,
) -> dict[str, Any]:
    """Return times of both executors. Exits where their logits differ, in the mode `exact`.

    block_size: of the ranks' cache.
    """
    whole_ms, ranks_ms = [], []
    received_bytes = 0
    for number in pairs:
        size = rows, tokens, whole.program.vocab_size, number + 2
        batches = {
            id(whole): step_batch(*size, depth=depth),
            id(ranks): step_batch(*size, depth=depth, block_size=block_size),
        }
        if number == 0:
            ranks.set_timed(True)
            received_bytes = received_by(ranks)
        order = (whole, ranks) if number % 2 else (ranks, whole)
        found = {id(one): run_step(one, batches[id(one)]) for one in order}
        if mode is TpMode.EXACT and found[id(whole)][1] != found[id(ranks)][1]:
            sys.exit(f"ranks and one process differ in a step of {rows} x {tokens} tokens")
        if number >= 0:
            whole_ms.append(found[id(whole)][0])
            ranks_ms.append(found[id(ranks)][0])
    received_bytes = received_by(ranks) - received_bytes
    exchanged, attended = shares_of_time(ranks)
    step = StepShape([tokens] * rows, [depth] * rows)
    ratios = [one / other for one, other in zip(whole_ms, ranks_ms, strict=True)]
    return {
        "rows": rows,
        "tokens": tokens,
        "depth": depth,
        "one_process_ms": statistics.median(whole_ms),
        "ranks_ms": statistics.median(ranks_ms),
        "ratio": statistics.median(ratios),
        "share_of_exchanges": exchanged,
        "share_of_attention": attended,
        "pairs": len(ratios),
        "received_bytes": received_bytes // len(ratios),
        "received_bytes_by_cost": ranks.program.step_cost(step).comm_bytes,
    }


def shares_of_time(ranks: MirroredExecutor) -> tuple[float, float]:
    """Return the shares of rank 0's time in exchanges and in attention; takes it no longer."""
    seconds = [unit for segment in ("trunk", "head") for unit in ranks.times(segment)]
    exchanged = sum(s for ops, s in seconds if isinstance(ops[0], AllGather | AllReduce | Recv))
    attended = sum(s for ops, s in seconds if isinstance(ops[0], Attention))
    ranks.set_timed(False)
    total = sum(s for _, s in seconds)
    return exchanged / total, attended / total


def modes_in_pairs(
    modes: dict[TpMode, MirroredExecutor], rows: int, tokens: int, pairs: Pairs
) -> dict[str, Any]:
    """Return times and bytes of the same step in both modes, one after the other."""
    taken_ms: dict[TpMode, list[float]] = {mode: [] for mode in modes}
    before = dict.fromkeys(modes, 0)
    for number in pairs:
        vocab_size = modes[TpMode.EXACT].program.vocab_size
        batch = step_batch(rows, tokens, vocab_size, number + 2)
        if number == 0:
            for mode, ranks in modes.items():
                ranks.set_timed(True)
                before[mode] = received_by(ranks)
        for mode in (TpMode.EXACT, TpMode.FAST) if number % 2 else (TpMode.FAST, TpMode.EXACT):
            ms, _ = run_step(modes[mode], batch)
            if number >= 0:
                taken_ms[mode].append(ms)
    step = StepShape([tokens] * rows, [DEPTH] * rows)
    exact_ms, fast_ms = taken_ms[TpMode.EXACT], taken_ms[TpMode.FAST]
    entry: dict[str, Any] = {
        "rows": rows,
        "tokens": tokens,
        "pairs": len(exact_ms),
        "ratio": statistics.median(a / b for a, b in zip(exact_ms, fast_ms, strict=True)),
    }
    for mode, ranks in modes.items():
        received_bytes = (received_by(ranks) - before[mode]) // len(exact_ms)
        entry[mode] = {
            "ms": statistics.median(taken_ms[mode]),
            "share_of_exchanges": shares_of_time(ranks)[0],
            "received_bytes": received_bytes,
            "received_bytes_per_token": received_bytes / (rows * tokens),
            "received_bytes_by_cost": ranks.program.step_cost(step).comm_bytes,
        }
    return entry


def expert_plan(experts: str, whole: NativeExecutor, degree: int) -> ExpertPlan | None:
    """Return how experts are placed: by the loads of a few steps where that is asked for."""
    if experts == "split":
        return None
    if experts == "whole":
        return ExpertPlan()
    for number in range(4):
        run_step(whole, step_batch(1, PREFILL_TOKENS, whole.program.vocab_size, number))
    return ExpertPlan(loads=tuple(map(tuple, whole.expert_loads)), redundant=degree)


def part_of(batch: ForwardBatch, first: int, end: int) -> ForwardBatch:
    """Return sequences first .. end - 1 of a step of one token each."""
    rows = slice(first, end)
    (cache,) = batch.caches
    return ForwardBatch(
        token_ids=batch.token_ids[rows],
        positions=batch.positions[rows],
        rope_positions=batch.rope_positions[rows],
        caches=(CacheRows(kv_slots=cache.kv_slots[rows], block_tables=cache.block_tables[rows]),),
        seq_starts=np.arange(end - first + 1, dtype=np.int32),
        sample_rows=np.arange(end - first, dtype=np.int32),
    )


def run_rounds(stages: PipelineExecutor, batch: ForwardBatch) -> tuple[float, bytes]:
    """Return the milliseconds of ROUNDS rounds of micro-batches, and the logits of the last."""
    time.sleep(PAUSE_S)
    rows, number = len(batch.sample_rows), stages.num_stages
    edges = [rows * part // number for part in range(number + 1)]
    parts = [part_of(batch, first, end) for first, end in pairwise(edges)] * ROUNDS
    found: list[bytes] = []
    began_s = time.perf_counter()
    for at, part in enumerate([*parts, *[None] * (number - 1)]):
        if part is not None:
            stages.begin_trunk(part)
        if at >= number - 1:
            ready = parts[at - number + 1]
            stages.run_trunk(ready, head_rows=len(ready.sample_rows))
            found.append(stages.run_head(ready, 0, len(ready.sample_rows)).tobytes())
    return 1e3 * (time.perf_counter() - began_s), b"".join(found[-number:])


def micro_batches(
    whole: NativeExecutor, stages: PipelineExecutor, rows: int, pairs: Pairs
) -> dict[str, Any]:
    """Return times of decode steps of `rows` rows, all stages busy. Exits where logits differ."""
    whole_ms, stages_ms, bubbles = [], [], []
    for number in pairs:
        batch = step_batch(rows, 1, whole.program.vocab_size, number + 2)
        waited_ms = stages.waited_ms
        all_ms, logits = run_rounds(stages, batch)
        waited_ms = stages.waited_ms - waited_ms
        one = [run_step(whole, batch) for _ in range(ROUNDS)]
        if one[-1][1] != logits:
            sys.exit(f"stages and one process differ in a step of {rows} rows")
        if number >= 0:
            whole_ms.append(statistics.fmean(ms for ms, _ in one))
            stages_ms.append(all_ms / ROUNDS)
            bubbles.append(waited_ms / all_ms)
    ratios = [one / other for one, other in zip(whole_ms, stages_ms, strict=True)]
    return {
        "rows": rows,
        "pairs": len(ratios),
        "one_process_ms": statistics.median(whole_ms),
        "stages_ms": statistics.median(stages_ms),
        "ratio": statistics.median(ratios),
        "bubble": statistics.median(bubbles),
    }


def computed(program: Program, machine: Described, rows: int) -> dict[str, Any]:
    """Return a decode step by the rates of a machine: computed, not measured."""
    step = StepShape([1] * rows, [DEPTH] * rows)
    shares: dict[TpMode, list[Program]] = {}
    for mode in TpMode:
        with suppress(SettingError):  # groups of integers that the columns of a rank divide
            shares[mode] = [
                shard(program, degree=machine.degree, rank=rank, mode=mode)
                for rank in range(machine.degree)
            ]
    costs = [share.step_cost(step) for share in shares[TpMode.EXACT]]
    own = shares[TpMode.EXACT][0]
    read_ms = max(cost.memory_bytes for cost in costs) / machine.rank_gb_per_s / 1e6
    layers = len(program.layer_starts)
    width = program.outputs["hidden"].width
    head_bytes = own.segment_cost("head", step).comm_bytes
    # A ring all-reduce moves each element twice, less the rank's own share; in bf16.
    share = (machine.degree - 1) / machine.degree
    summed_bytes = round(2 * layers * rows * width * 2 * 2 * share) + head_bytes

    def exchange_ms(number: int, num_bytes: int) -> float:
        return number * machine.exchange_us / 1e3 + num_bytes / machine.link_gb_per_s / 1e6

    def of_mode(mode: TpMode) -> dict[str, Any] | None:
        """What the ranks' programs exchange and read in a mode; None where it is refused."""
        if mode not in shares:
            return None
        costs = [share.step_cost(step) for share in shares[mode]]
        exchanges = sum(map(num_exchanges, shares[mode][0].segments.values()))
        received = max(cost.comm_bytes for cost in costs)
        ms = max(cost.memory_bytes for cost in costs) / machine.rank_gb_per_s / 1e6
        ms += exchange_ms(exchanges, received)
        return {
            "bytes": received,
            "bytes_per_token": received / rows,
            "exchanges": exchanges,
            "step_ms": ms,
            "speedup": one_ms / ms,
        }

    # A stage needs a layer: fewer stages than ranks where there are fewer layers.
    num_stages = min(machine.degree, layers)
    group = max(rows // num_stages, 1)
    micro = StepShape([1] * group, [DEPTH] * group)
    stages = [own.step_cost(micro) for own in split(program, num_stages)]
    stage_ms = max(
        cost.memory_bytes / machine.rank_gb_per_s / 1e6 + exchange_ms(1, cost.comm_bytes)
        for cost in stages
    )
    # All rows once: each micro-batch takes the time of the slowest stage; fewer rows than stages
    # leave the others idle.
    round_ms = stage_ms * num_stages
    one_ms = program.step_cost(step).memory_bytes / machine.rank_gb_per_s / 1e6
    sums_ms = read_ms + exchange_ms(2 * layers + 1, summed_bytes)
    return {
        "computed_for": asdict(machine),
        "rows": rows,
        "one_rank_ms": one_ms,
        "exact": of_mode(TpMode.EXACT),
        "fast": of_mode(TpMode.FAST),
        "sums": {"bytes": summed_bytes, "step_ms": sums_ms, "speedup": one_ms / sums_ms},
        "stages": {
            "number": num_stages,
            "bytes": max(cost.comm_bytes for cost in stages),
            "step_ms": round_ms,
            "speedup": one_ms / round_ms,
        },
    }


def arguments() -> argparse.Namespace:
    """Return what is asked for."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b")
    parser.add_argument("--precision", default="none")
    parser.add_argument("--degree", type=int, default=2)
    parser.add_argument("--mode", choices=list(map(str, TpMode)), default="exact")
    parser.add_argument("--experts", choices=("split", "whole", "placed"), default="split")
    parser.add_argument("--stages", type=int, default=1)
    parser.add_argument("--context", type=int, default=1)
    parser.add_argument("--depth", type=int)
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--seconds", type=float, help="of each step; 12, with --cells 4")
    parser.add_argument("--compare", choices=("threads", "modes"))
    parser.add_argument("--cells", choices=("all", *CELLS), help="small layouts for two cores")
    parser.add_argument("--write", action="store_true")
    return parser.parse_args()


@dataclass(frozen=True)
class Layout:
    """What is measured: a model, what it is asked for, and the sizes of its executors."""

    asked: argparse.Namespace
    program: Program
    checkpoint: Checkpoint
    options: ExecutorOptions

    @property
    def depth(self) -> int:
        """Positions before each step."""
        return self.asked.depth or (DEPTH if self.asked.context == 1 else CONTEXT_DEPTH)

    @property
    def decoded_rows(self) -> tuple[int, ...]:
        """The sizes of the decode steps."""
        return DECODED_ROWS if self.asked.context == 1 else CONTEXT_ROWS

    @property
    def steps(self) -> list[tuple[int, int]]:
        """Rows and tokens of each row, of all steps."""
        return [(rows, 1) for rows in self.decoded_rows] + [(1, PREFILL_TOKENS)]

    @property
    def block_size(self) -> int:
        """Of the ranks' cache."""
        return BLOCK_SIZE if self.asked.context == 1 else self.asked.context * PIECE_POSITIONS

    def num_blocks(self, block_size: int) -> int:
        """Return the blocks of a cache."""
        return max(self.decoded_rows) * ((self.depth + PREFILL_TOKENS) // block_size + 2)

    def ranks(self, mode: TpMode, plan: ExpertPlan | None) -> MirroredExecutor:
        """Load the ranks, with an empty cache."""
        asked = self.asked
        shared: dict[str, Any] = {
            "degree": asked.degree * asked.context,
            "context": asked.context,
            "experts": plan,
            "mode": mode,
        }
        made = (
            RankedExecutorClass(**shared)
            if asked.stages == 1
            else PipelineExecutorClass(stages=asked.stages, **shared)
        )
        executor = made(self.program, self.checkpoint, self.options)
        executor.allocate_cache(self.num_blocks(self.block_size), self.block_size)
        assert isinstance(executor, MirroredExecutor), "ranks of the native executor"
        return executor

    def pairs(self, what: str) -> Pairs:
        """Return the pairs of a measurement."""
        asked = self.asked
        seconds = STEP_SECONDS if asked.seconds is None else asked.seconds
        return Pairs(f"{asked.shape}: {what}", asked.pairs, seconds)


def layout_of(asked: argparse.Namespace) -> Layout:
    """Return what is asked for. Exits where ranks would share cores."""
    num_ranks = asked.degree * asked.context * asked.stages
    if num_usable_cores() < num_ranks:
        sys.exit(f"{num_ranks} ranks need as many cores; there are {num_usable_cores()}")
    print(f"{asked.shape}: loading the executors", file=sys.stderr, flush=True)
    folder = random_checkpoint(asked.shape)
    max_positions = (asked.depth or (DEPTH if asked.context == 1 else CONTEXT_DEPTH)) + 512
    plain = build_program(open_model(folder), dtype=DType.BF16, max_positions=max_positions)
    most = max(DECODED_ROWS if asked.context == 1 else CONTEXT_ROWS)
    limits = StepLimits(max_tokens=PREFILL_TOKENS, max_samples=most, max_sequences=most)
    return Layout(
        asked,
        quantize(plain, asked.precision),
        open_checkpoint(folder),
        ExecutorOptions(limits=limits, num_threads=num_ranks),
    )


def against_threads(layout: Layout) -> dict[str, Any]:
    """Measure ranks against threads of one process. Prints each step."""
    asked, program = layout.asked, layout.program
    whole = NativeExecutor(program, layout.checkpoint, layout.options)
    num_blocks = layout.num_blocks(BLOCK_SIZE)
    whole.allocate_cache(num_blocks, BLOCK_SIZE)
    degree = asked.degree * asked.context
    mode, plan = TpMode(asked.mode), expert_plan(asked.experts, whole, degree)
    whole.allocate_cache(num_blocks, BLOCK_SIZE)  # as empty as that of the ranks
    ranks = layout.ranks(mode, plan)
    if asked.context > 1:  # pages that were never written are one page of zeros, always in a cache
        for layer in range(program.caches[0].layers):
            whole.touch_blocks(layer, 0, num_blocks)
            ranks.touch_blocks(layer, 0, layout.num_blocks(layout.block_size))
    found: dict[str, Any] = {"balance": None, "steps": []}
    for rows, tokens in layout.steps:
        turns = layout.pairs(f"a step of {rows} x {tokens}")
        entry = in_pairs(whole, ranks, rows, tokens, turns, mode, layout.depth, layout.block_size)
        found["steps"].append(entry)
        print(json.dumps(entry), flush=True)
    if isinstance(ranks, PipelineExecutor) and asked.context == 1:
        found["micro_batches"] = []
        for rows in DECODED_ROWS:
            if rows >= asked.stages:
                turns = layout.pairs(f"micro-batches of {rows} rows")
                entry = micro_batches(whole, ranks, rows, turns)
                found["micro_batches"].append(entry)
                print(json.dumps(entry), flush=True)
    if plan is not None and asked.stages == 1:
        placement = plan.placement(program, degree)
        found["balance"] = balance(ranks.expert_loads, placement, degree)
        print(f"mean load of a rank over the largest: {found['balance']:.3f}", flush=True)
    ranks.close()
    whole.close()
    return found


def has_both_modes(layout: Layout) -> bool:
    """Return whether ranks of such products are measured in both modes. Exits where these are asked
    for and cannot be."""
    asked, why = layout.asked, ""
    if not (asked.stages == asked.context == 1 and asked.experts == "split"):
        why = "--compare modes is for ranks of products: leave out what else divides the model"
    elif asked.mode != TpMode.EXACT:
        why = "--compare modes measures both: leave out --mode"
    else:
        try:
            for rank in range(asked.degree):
                shard(layout.program, degree=asked.degree, rank=rank, mode=TpMode.FAST)
        except SettingError as error:  # of a precision with groups that ranks would divide
            why = str(error)
    if why and asked.compare == "modes":
        sys.exit(why)
    return not why


def both_modes(layout: Layout) -> list[dict[str, Any]]:
    """Measure --tp-mode exact against fast. Prints each step."""
    modes = {mode: layout.ranks(mode, None) for mode in TpMode}
    entries = []
    for rows, tokens in layout.steps:
        turns = layout.pairs(f"both modes, a step of {rows} x {tokens}")
        entries.append(modes_in_pairs(modes, rows, tokens, turns))
        print(json.dumps(entries[-1]), flush=True)
    for ranks in modes.values():
        ranks.close()
    return entries


def measured(asked: argparse.Namespace) -> dict[str, Any]:
    """Measure the steps of one layout. Prints each of them."""
    layout = layout_of(asked)
    found: dict[str, Any] = {
        "bench": "parallel",
        "machine": machine_card(),
        "shape": asked.shape,
        "precision": asked.precision,
        "degree": asked.degree,
        "mode": asked.mode,
        "experts": asked.experts,
        "stages": asked.stages,
        "context": asked.context,
    }
    if asked.compare != "modes":
        found |= against_threads(layout)
    if asked.compare != "threads" and has_both_modes(layout):
        found["modes"] = both_modes(layout)
    found["computed"] = [
        computed(layout.program, one, rows) for one in DESCRIBED for rows in (1, 64)
    ]
    return found


def cells(asked: argparse.Namespace) -> dict[str, Any]:
    """Measure small layouts one after the other."""
    names = list(CELLS) if asked.cells == "all" else [asked.cells]
    seconds = CELL_SECONDS if asked.seconds is None else asked.seconds
    found = {}
    for number, name in enumerate(names, 1):
        print(f"[{number}/{len(names)}] {name}", file=sys.stderr, flush=True)
        print(name, flush=True)
        compared = asked.compare or "threads"
        layout = {**vars(asked), "compare": compared, **CELLS[name], "seconds": seconds}
        found[name] = measured(argparse.Namespace(**layout))
    return {"bench": "parallel_cells", "machine": machine_card(), "cells": found}


def main() -> None:
    """Measure, write, print."""
    asked = arguments()
    if asked.cells is not None:
        found, name = cells(asked), "parallel_cells.json"
    else:
        found = measured(asked)
        print(json.dumps(found["computed"], indent=1))
        name = "parallel.json" if asked.stages == 1 else "pipeline.json"
        name = "context.json" if asked.context > 1 else name
    if asked.write:
        (RESULTS / name).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
