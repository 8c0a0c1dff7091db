"""Ranks of the torch executor: tokens and log-probabilities are bit for bit those of one process.

Processes compute drawn cases of tests/exact on CPU tensors, with tiers, drafts and mixtures of
experts, split or whole on ranks; threads compute single prompts by kernels, and from captured
steps. QUIRE_GPU_EXACT_RANK_CASES draws more cases.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from quire.base.errors import DeviceLost, ModelError, WorkerError
from quire.comm.in_process import InProcessGroup, InProcessRank
from quire.config.proposer_kinds import HEADS as HEAD_KINDS
from quire.execute.executor import Executor, ExecutorOptions, StepLimits
from quire.execute.gpu import executor_class as torch_class
from quire.execute.gpu import offload_plan
from quire.execute.gpu.exchange import HostExchange
from quire.execute.gpu.executor import TorchExecutor
from quire.execute.gpu.executor_class import TorchExecutorClass
from quire.execute.gpu.kernels import linear_fixed
from quire.execute.gpu.limits import NCCL_BYTES
from quire.execute.gpu.offload_plan import OffloadSize
from quire.program.comm_ops import AllGather
from quire.program.declarations import PIECE_POSITIONS, Weight
from quire.program.expert_parallel import ExpertPlan, mixtures
from quire.program.program import Program
from quire.program.row_parallel import TpMode
from quire.program.shard import shard
from quire.program.tensors import DType
from quire.ranks.executor_class import RankedExecutorClass
from quire.ranks.own_pieces import OwnPieces
from quire.ranks.pipeline_class import PipelineExecutorClass
from quire.ranks.torch_executor import MirroredTorch, TorchPipeline
from quire.ranks.torch_kind import TorchRanks, ranks_like
from quire.sampling.batch import NoiseKeys, SampleBatch
from quire.sampling.scoring import ScoreBatch
from quire.sim.ranks import largest_memory
from quire.weights.checkpoint import Checkpoint, open_checkpoint
from tests.conftest import SHOWN
from tests.connected_ranks import connected_site
from tests.exact.divided_models import LIMITS as EXACT_LIMITS
from tests.exact.divided_models import (
    DividedModel,
    any_differs,
    compare_with_one_process,
    drafted_cases,
)
from tests.exact.rig import AloneRuns, Model, differences, run_case
from tests.exact.test_context import MAX_MODEL_LEN, long_case
from tests.exact.test_ranks import GOALS, MAX_SHOWN, case_for_ranks
from tests.exact.test_stages import CountingRunner, case_for_stages
from tests.exact.workload import VOCAB_SIZE, Case
from tests.gpu.rank_kernels import (
    CHUNK,
    IDS,
    LIMITS,
    POSITIONS,
    ByTurns,
    Float32s,
    by_kernels,
    kernel_logits,
    kernel_rank,
    of_rank,
)
from tests.gpu.torch_models import CPU, program_of, torch_executor
from tests.models.cases_experts import MIXTRAL, QWEN2_MOE, QWEN3_MOE
from tests.models.cases_gemma import GEMMA3
from tests.models.cases_qwen import QWEN3
from tests.models.generate import logits_of, sequence_batch
from tests.rank_threads import on_all_ranks
from tests.serve.test_ranks import check_lost_rank
from tests.tiny_models import write_tiny, write_tiny_llama

pytestmark = pytest.mark.gpu

NUM_CASES = int(os.environ.get("QUIRE_GPU_EXACT_RANK_CASES", "6"))
HEADS: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2}
SIZE = {"vocab_size": VOCAB_SIZE, "max_position_embeddings": 512, "num_hidden_layers": 2}
SEVEN = {"num_local_experts": 7}
OPTIONS = ExecutorOptions(limits=LIMITS)
ONE = TorchExecutorClass(CPU, poison=True)


def kind(transport: str = "host") -> TorchRanks:
    """Return ranks of CPU tensors."""
    made = ranks_like(ONE, num_ranks=4, of_stage=4, num_here=4, asked="ranks")
    settings: Any = replace(made.settings, transport=transport)  # type: ignore[arg-type]
    return replace(made, settings=settings)


def divided(
    degree: int, stages: int = 1, transport: str = "host", **more: Any
) -> RankedExecutorClass:
    """Return the class of an executor over processes. more: of RankedExecutorClass."""
    shared: dict[str, Any] = {
        "degree": degree,
        "binds": False,
        "poison": True,
        "shares_blocks": True,
        "kind": kind(transport),
        **more,
    }
    if stages == 1:
        return RankedExecutorClass(**shared)
    return PipelineExecutorClass(stages=stages, **shared)


class TorchModel(Model):
    """A model of tests/exact in one process, with its draft model and draft heads."""

    has_heads = True

    def _make(self, program: Program, checkpoint: Checkpoint, num_threads: int) -> Executor:
        return ONE(program, checkpoint, ExecutorOptions(limits=EXACT_LIMITS))


@pytest.fixture(scope="module")
def wholes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Model]]:
    root = tmp_path_factory.mktemp("ranks")
    llama = write_tiny_llama(root / "llama", seed=15, hidden_size=68, num_hidden_layers=2, **HEADS)
    qwen = write_tiny(root / "qwen", QWEN3 | SIZE | HEADS, seed=17)
    layers = {"layer_types": ["sliding_attention", "full_attention"]}
    gemma = write_tiny(root / "gemma", GEMMA3 | SIZE | HEADS | layers, seed=18, dtype="bf16")
    mixtral = write_tiny(root / "mixtral", MIXTRAL | SIZE | HEADS | SEVEN, seed=21)
    moe = write_tiny(root / "moe", QWEN3_MOE | SIZE | HEADS, seed=22)
    made: list[Model] = [
        TorchModel(llama, DType.F32),
        TorchModel(qwen, DType.BF16),
        TorchModel(gemma, DType.BF16),
        TorchModel(llama, DType.BF16, "int8", "int8"),
        TorchModel(mixtral, DType.BF16),
        TorchModel(moe, DType.BF16, "int8"),
    ]
    yield made
    for model in made:
        model.close()


def torch_case(case: Case) -> Case:
    """Return a case with drafts of a draft model in place of those of heads, which need further
    processes."""
    others = dict.fromkeys(HEAD_KINDS, "draft")
    proposer = others.get(case.settings.proposer, case.settings.proposer)
    return replace(case, settings=replace(case.settings, proposer=proposer))


def of_experts(whole: Model) -> dict[str, Any]:
    """Return how whole experts are on ranks, of a model with many; some of them on several."""
    experts = [op.routing.width for op in mixtures(whole.program)]
    if max(experts, default=0) <= MIXTRAL["num_local_experts"]:
        return {}
    loads = tuple(tuple(1000 // (1 + e) for e in range(count)) for count in experts)
    return {"experts": ExpertPlan(loads=loads, redundant=3)}


def test_two_ranks_answer_as_one_process(wholes: list[Model], record_property: object) -> None:
    models = [DividedModel(whole, divided(2, **of_experts(whole))) for whole in wholes]
    numbers = range(1, NUM_CASES + 1)  # the sixth is the first that fetches from a tier
    cases = (torch_case(case_for_ranks(number, len(models))) for number in numbers)
    goals = [goal for goal in GOALS if goal != "layered"]
    lines, reached = compare_with_one_process(models, cases, goals)
    record_property(SHOWN, f"2 torch ranks: {NUM_CASES} cases; {reached}")  # type: ignore[operator]
    assert not lines, f"{len(lines)} differences:\n" + "\n".join(lines[:MAX_SHOWN])
    assert all(reached.values()), reached


def test_two_stages_answer_as_one_process(wholes: list[Model], record_property: object) -> None:
    num_cases = max(NUM_CASES // 2, 2)
    CountingRunner.overlapped = 0
    models = [DividedModel(wholes[number], divided(1, 2)) for number in (0, 1, 4)]
    cases = (torch_case(case_for_stages(number, len(models), 2)) for number in range(num_cases))
    lines, reached = compare_with_one_process(
        models, cases, ("preempted", "chunked"), runner_type=CountingRunner
    )
    record_property(SHOWN, f"2 torch stages: {num_cases} cases; {reached}")  # type: ignore[operator]
    assert not lines, f"{len(lines)} differences:\n" + "\n".join(lines[:MAX_SHOWN])
    assert CountingRunner.overlapped
    assert all(reached.values()), reached


def test_draft_heads_change_no_answer(wholes: list[Model]) -> None:
    """Heads read hidden states of one process, and of rank 0 of two."""
    models = {"medusa": wholes[0], "eagle": DividedModel(wholes[0], divided(2))}
    for case in drafted_cases((case_for_ranks(number, 1) for number in count()), HEAD_KINDS, 1):
        model, alone = models[case.settings.proposer], AloneRuns()
        if model is wholes[0]:  # hidden states of steps in flight are kept as well
            case = replace(case, settings=replace(case.settings, plans_in_flight=2))
        for request in case.requests:
            alone.of(wholes[0], request)
        outcome = run_case(model, case, alone=alone)
        assert not differences(wholes[0], outcome, alone)
        assert sum(plan.draft_ids.size for plan, _ in outcome.plans), case.settings.proposer
    models["eagle"].close()


def test_ranks_that_divide_positions_answer_as_one_process(
    tmp_path: Path, record_property: object
) -> None:
    size = SIZE | {"max_position_embeddings": MAX_MODEL_LEN}
    heads = {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 16}
    folder = write_tiny_llama(tmp_path, seed=25, hidden_size=52, **heads, **size)
    whole = TorchModel(folder, DType.BF16, "int8", "int8", MAX_MODEL_LEN)
    model = DividedModel(whole, divided(2, context=2))
    lines, reached = compare_with_one_process(
        [model], [torch_case(long_case(2, 1, 2, 1))], ("chunked", "saved", "accepted")
    )
    whole.close()
    record_property(SHOWN, f"positions on 2 torch ranks: {reached}")  # type: ignore[operator]
    assert not lines, f"{len(lines)} differences:\n" + "\n".join(lines[:MAX_SHOWN])
    assert all(reached.values()), reached


class InAnotherOrder(RankedExecutorClass):
    """Ranks that put the columns of the last exchange at the places of others."""

    def programs(self, program: Program) -> list[Program]:
        made = super().programs(program)
        return [self._planted(own) for own in made]

    def _planted(self, own: Program) -> Program:
        trunk = list(own.segments["trunk"])
        *_, (at, last) = (
            (index, op) for index, op in enumerate(trunk) if isinstance(op, AllGather)
        )
        trunk[at] = replace(last, unit=1)
        return replace(own, segments={**own.segments, "trunk": tuple(trunk)})


def test_a_fault_in_an_exchange_is_detected(wholes: list[Model]) -> None:
    planted = InAnotherOrder(degree=2, binds=False, kind=kind())
    case = torch_case(case_for_ranks(0, len(wholes)))
    assert any_differs(DividedModel(wholes[0], planted), [case])


# ---- one prompt: degrees, transports, precisions


def answer(executor: Executor) -> Float32s:
    """Return the logits of a prompt in chunks."""
    return answer_with_loads(executor)[0]


def answer_with_loads(executor: Any) -> tuple[Float32s, list[list[int]]]:
    """Return the logits of a prompt in chunks, and how often its rows chose each expert."""
    executor.allocate_cache(POSITIONS // 16 + 1, 16)
    logits = logits_of(executor, IDS, max_positions=POSITIONS, chunk=CHUNK)
    loads = executor.expert_loads
    executor.close()
    return logits, loads


def small(program: Program) -> Program:
    """Return a program of few positions."""
    return replace(program, max_positions=POSITIONS)


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a head that is its embedding, and widths that do not divide."""
    folder = tmp_path_factory.mktemp("tied")
    more = {"hidden_size": 68, "num_hidden_layers": 2, "tie_word_embeddings": True}
    return write_tiny_llama(folder, seed=16, dtype="bf16", **(HEADS | more))


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture of an odd number of experts, and one that every row chooses."""
    folder, more = tmp_path_factory.mktemp("mixture"), {"num_experts": 7}
    return write_tiny(folder, QWEN2_MOE | SIZE | HEADS | more, seed=23)


@pytest.mark.parametrize(
    ("model", "asked", "precision"),
    [
        ("tied", {"degree": 4}, "none"),
        ("mixture", {"degree": 2, "stages": 2, "transport": "gloo"}, "int4-g32"),
        ("mixture", {"degree": 2, "transport": "gloo", "experts": ExpertPlan()}, "int8"),
        ("mixture", {"degree": 2}, "int4-g32"),
    ],
    ids=[
        "four ranks",
        "two stages of two ranks, gloo, int4",
        "whole experts, gloo, int8",
        "experts by columns, int4",
    ],
)
def test_degrees_and_transports_give_the_bits_of_one_process(
    model: str, asked: dict[str, Any], precision: str, request: pytest.FixtureRequest
) -> None:
    folder = request.getfixturevalue(model)
    program = small(program_of(folder, DType.BF16, precision))
    checkpoint, one = open_checkpoint(folder), ONE(program, open_checkpoint(folder), OPTIONS)
    digest, (whole, loads) = one.weights_digest, answer_with_loads(one)
    chosen = len(IDS) * QWEN2_MOE["num_experts_per_tok"]
    assert [sum(counts) for counts in loads] == [chosen for _ in mixtures(program)]
    made = divided(**asked)
    executor: Any = made(program, checkpoint, OPTIONS)
    assert isinstance(executor, TorchPipeline if "stages" in asked else MirroredTorch)
    assert executor.weights_digest == digest
    logits, loads_of_ranks = answer_with_loads(executor)
    np.testing.assert_array_equal(logits, whole, strict=True)
    assert loads_of_ranks == loads, "of the mixtures of all stages"
    assert isinstance(made.kind, TorchRanks)
    meeting = Path(made.kind.settings.rendezvous_files)
    assert not list(meeting.parent.glob(f"{meeting.name}*"))


def test_positions_and_heads_on_four_ranks_give_the_bits_of_one_process(tied: Path) -> None:
    """A prompt of three pieces, of which the last is in another block of the engine."""
    limits = StepLimits(max_tokens=200, max_samples=200, max_sequences=1)
    options, size = ExecutorOptions(limits=limits), 2 * PIECE_POSITIONS
    program = replace(program_of(tied, DType.BF16), max_positions=2 * size)
    ids = np.random.default_rng(5).integers(0, program.vocab_size, size + 20).tolist()
    found = []
    for made, block_size in ((ONE, 16), (divided(4, context=2, block_size=32), size)):
        executor: Executor = made(program, open_checkpoint(tied), options)
        executor.allocate_cache(program.max_positions // block_size + 1, block_size)
        rows = []
        for start in range(0, len(ids), 200):
            chunk = ids[start : start + 200]
            batch = sequence_batch(chunk, start, program.max_positions, block_size)
            executor.run_trunk(batch)
            rows.append(np.array(executor.run_head(batch, len(chunk) - 5, 5)))
        found.append(np.concatenate(rows))
        executor.close()
    one, ranks = found
    np.testing.assert_array_equal(ranks, one, strict=True)


# ---- weights in host memory


class TooMuch(TorchRanks):
    """Ranks above 0 that are to save more than they have."""

    def start_fields(self, rank: int) -> dict[str, Any]:
        return {"torch": {**super().start_fields(rank)["torch"], "saved_bytes": 1 << 40}}


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of which each of two stages has more layers than there are places for."""
    more = HEADS | {"num_hidden_layers": 8}
    return write_tiny_llama(tmp_path_factory.mktemp("deep"), seed=26, dtype="bf16", **more)


@pytest.mark.parametrize("layout", [(2, 1), (1, 2), (2, 2)], ids=["TP 2", "PP 2", "TP 2 x PP 2"])
def test_ranks_with_weights_in_host_memory_give_the_bits_of_one_process(
    layout: tuple[int, int], deep: Path
) -> None:
    program, checkpoint = small(program_of(deep, DType.BF16, "int8")), open_checkpoint(deep)
    one = ONE(program, checkpoint, OPTIONS)
    digest, whole = one.weights_digest, answer(one)
    made = divided(*layout)
    saving = replace(made, kind=replace(kind(), offload=OffloadSize(saved_bytes=1)))
    decided = saving.kind.for_programs(saving.programs(program), LIMITS, largest_memory)
    saved = [decided.start_fields(rank)["torch"]["saved_bytes"] for rank in range(made.num_ranks)]
    assert all(saved)
    less = made.memory_for(program, LIMITS).weights_bytes
    assert saving.memory_for(program, LIMITS).weights_bytes == less - sum(saved)
    executor: Any = saving(program, checkpoint, OPTIONS)
    stream, filled = executor.layer_stream, executor.layer_stream.copied_bytes
    assert executor.weights_digest == digest
    np.testing.assert_array_equal(answer(executor), whole, strict=True)
    assert stream.copied_bytes > filled > 0
    too_much = TooMuch(settings=kind().settings, offload=OffloadSize(saved_bytes=1))
    with pytest.raises(WorkerError, match=r"rank 1 .*at most .* are saved"):
        replace(saving, kind=too_much)(program, checkpoint, OPTIONS)


def test_steps_are_captured_on_all_ranks_or_on_none(
    deep: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Captured steps exchange padded rows; here only the first rank lacks memory."""
    programs = divided(2).programs(small(program_of(deep, DType.BF16)))
    lacking = iter((1, 0))
    monkeypatch.setattr(offload_plan, "missing_bytes", lambda *_, **__: next(lacking))
    ranks = replace(kind(), offload=OffloadSize(saved_bytes=None))
    assert ranks.settings.captures
    decided = ranks.for_programs(programs, LIMITS, largest_memory)
    fields = [decided.start_fields(rank)["torch"] for rank in range(2)]
    found = [(one["saved_bytes"] > 0, one["captures"]) for one in fields]
    assert found == [(True, False), (False, False)]


class Apart(TorchRanks):
    """Ranks of CPU tensors that share no memory with each other, as those with a GPU each."""

    @property
    def shares_memory(self) -> bool:
        return False


def test_ranks_have_the_blocks_of_one_process_wherever_they_run(tied: Path) -> None:
    """In shared memory, on sockets and with pools of their own: blocks of values and scales, of
    which each rank has its layers and heads; and its logits."""
    program = small(program_of(tied, DType.BF16, "none", "int8"))
    found = []
    apart = Apart(settings=kind().settings)
    layouts = [replace(divided(2, 2), site=connected_site(4)), divided(2), divided(2, kind=apart)]
    for made in (ONE, *layouts):
        executor: Executor = made(program, open_checkpoint(tied), OPTIONS)
        executor.allocate_cache(POSITIONS // 16 + 1, 16)
        logits = logits_of(executor, IDS, max_positions=POSITIONS, chunk=CHUNK)
        raw, again = (np.zeros(executor.block_bytes, np.uint8) for _ in range(2))
        executor.export_block(POSITIONS // 16, raw)  # of the first positions
        executor.import_block(0, raw)
        executor.export_block(0, again)
        executor.close()
        np.testing.assert_array_equal(again, raw)
        assert raw.any()
        found.append((logits, raw))
    for one, *ranks in zip(*found, strict=True):
        for of_ranks in ranks:
            np.testing.assert_array_equal(of_ranks, one, strict=True)


def test_a_rejected_batch_leaves_the_ranks_in_step_and_a_dead_rank_is_named(tied: Path) -> None:
    program, checkpoint = small(program_of(tied, DType.BF16)), open_checkpoint(tied)
    for made in (divided(2), divided(1, 2), divided(2, transport="gloo")):
        executor: Any = made(program, checkpoint, OPTIONS)
        executor.allocate_cache(5, 16)
        before = logits_of(executor, [1, 2, 3], max_positions=POSITIONS)
        with pytest.raises(ValueError, match="token_ids"):
            logits_of(executor, [1, 999, 3], max_positions=POSITIONS)
        after = logits_of(executor, [1, 2, 3], max_positions=POSITIONS)
        np.testing.assert_array_equal(after, before, strict=True)
        (pid,) = executor.processes.process_ids
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(DeviceLost, match=r"rank 1 .* was ended by signal 9"):
            logits_of(executor, [1, 2, 3], max_positions=POSITIONS)
        executor.close()


def test_nothing_is_taken_from_a_step_whose_exchange_was_aborted_in_silence(tied: Path) -> None:
    """As NCCL's kernels end: without an error, their outputs as they were."""
    program, checkpoint = small(program_of(tied, DType.BF16)), open_checkpoint(tied)
    executor: Any = divided(2)(program, checkpoint, OPTIONS)
    executor.allocate_cache(5, 16)
    logits = logits_of(executor, [1, 2, 3], max_positions=POSITIONS)
    mark = executor.mark()
    none, slots = np.full(1, -1, np.int32), np.zeros(1, np.int32)
    greedy = SampleBatch(
        positions=np.full(1, 3, np.int32),
        temperature=np.zeros(1, np.float32),
        noise=NoiseKeys(seeds=np.zeros(1, np.int64), streams=slots),
    )
    likely = ScoreBatch(targets=none, num_top=slots, listed_starts=np.zeros(2, np.int32))
    rows = logits[-1:]
    later = executor.sample_later(rows, greedy, slots)
    executor.group.native.abort()
    calls = {
        "mark": mark,
        "later": later,
        "sample": lambda: executor.sample(rows, greedy),
        "score": lambda: executor.score(rows, likely),
    }
    for call in calls.values():
        with pytest.raises(DeviceLost, match="a rank of the model is lost"):
            call()
    executor.close()


@pytest.mark.parametrize("model", ["tied", "mixture"])
def test_sums_in_the_order_of_ranks_are_the_same_on_all_and_do_not_depend_on_chunks(
    model: str, request: pytest.FixtureRequest
) -> None:
    folder: Path = request.getfixturevalue(model)
    program = small(program_of(folder, DType.F32))
    whole = answer(ONE(program, open_checkpoint(folder), OPTIONS))

    def run(group: InProcessRank, chunk: int = CHUNK) -> Float32s:
        own = shard(program, degree=2, rank=group.rank, mode=TpMode.FAST)
        executor = of_rank(folder, own, HostExchange(group, rank=group.rank, degree=2))
        executor.allocate_cache(POSITIONS // 16 + 1, 16)
        return logits_of(executor, IDS, max_positions=POSITIONS, chunk=chunk)

    first, second = on_all_ranks(InProcessGroup(2).ranks(), run)
    np.testing.assert_array_equal(first, second, strict=True)
    other, _ = on_all_ranks(InProcessGroup(2).ranks(), lambda group: run(group, 5))
    np.testing.assert_array_equal(first, other, strict=True)
    assert not np.array_equal(first, whole)
    assert np.abs(first - whole).max() <= 1e-4 * np.abs(whole).max()


# ---- kernels and captured steps, by threads


@pytest.fixture
def many_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let products of a tiny model have several pieces, as those of a large one have."""
    monkeypatch.setattr(linear_fixed, "FILL", 4)
    monkeypatch.setattr(linear_fixed, "SHORTEST_PIECE", 32)
    monkeypatch.setattr(linear_fixed, "PIECE_STEP", 32)


def test_kernels_and_captured_steps_of_ranks_give_the_bits_of_one_process(
    tmp_path: Path, many_pieces: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_tiny_llama(tmp_path, seed=9, hidden_size=128, num_hidden_layers=1, **HEADS)
    program = small(program_of(folder, DType.F32))
    whole_executor = torch_executor(folder, program, kernels=True, max_tokens=CHUNK)
    whole = kernel_logits(whole_executor)
    own = shard(program, degree=2, rank=1)
    pieces = [
        (
            linear_fixed.piece_of(weight.undivided_rows, weight.columns),
            linear_fixed.piece_of(weight.rows, weight.columns),
        )
        for weight in own.weights.values()
        if weight.columns
    ]
    assert any(undivided != share for undivided, share in pieces), "the case shows nothing"
    for logits, num_replayed, _ in by_kernels(folder, program, 2):
        np.testing.assert_array_equal(logits, whole, strict=True)
        assert num_replayed
    # By the share's own shape a rank would sum in another order.
    monkeypatch.setattr(Weight, "undivided_rows", property(lambda weight: weight.rows))
    assert not all(np.array_equal(logits, whole) for logits, _, _ in by_kernels(folder, program, 2))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of slots that nothing was computed for
@pytest.mark.parametrize(
    ("experts", "precision"),
    [(None, "none"), (ExpertPlan(loads=((9, 1, 1, 1, 1, 1, 1),), redundant=2), "int8")],
    ids=["by columns", "whole, with copies, int8"],
)
def test_kernels_of_mixtures_on_ranks_give_the_bits_of_one_process(
    experts: ExpertPlan | None, precision: str, tmp_path: Path
) -> None:
    """Experts by columns, and whole ones with copies, captured steps and late tokens included; a
    row of a captured step past the batch's chooses no expert."""
    more = {"num_hidden_layers": 1, "num_experts": 7, "hidden_size": 64}
    folder = write_tiny(tmp_path, QWEN2_MOE | SIZE | HEADS | more, seed=23)
    program = small(program_of(folder, DType.BF16, precision))
    whole_executor = torch_executor(folder, program, kernels=True, max_tokens=CHUNK)
    whole = kernel_logits(whole_executor)
    rows = 10
    loads = whole_executor.expert_loads
    assert [sum(counts) for counts in loads] == [rows * QWEN2_MOE["num_experts_per_tok"]]
    for logits, num_replayed, rank_loads in by_kernels(folder, program, 2, experts):
        np.testing.assert_array_equal(logits, whole, strict=True)
        assert num_replayed
        assert rank_loads == [[2 * count for count in counts] for counts in loads], "both rounds"


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of items that are parts, not whole rows
def test_kernels_of_ranks_that_divide_positions_give_the_bits_of_one_process(
    tmp_path: Path,
) -> None:
    """A prompt of two pieces in chunks and single tokens, under a window, with heads that do not
    divide; test_context_steps.py has more pieces and ranks."""
    heads = {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 16}
    more = {"hidden_size": 32, "intermediate_size": 32, "max_position_embeddings": 1024}
    layers = {"layer_types": ["sliding_attention"], "sliding_window": 200}
    layers |= {"num_hidden_layers": 1}
    folder = write_tiny(tmp_path, GEMMA3 | SIZE | heads | more | layers, seed=25)
    program = replace(program_of(folder, DType.F32), max_positions=1024)
    ids = np.random.default_rng(5).integers(0, program.vocab_size, 262).tolist()
    chunks = [(0, 100), (100, 259), (259, 260), (260, 262)]
    limits = StepLimits(max_tokens=160, max_samples=2, max_sequences=1)

    def run(executor: TorchExecutor, block_size: int, own: OwnPieces | None) -> Float32s:
        executor.allocate_cache(1024 // 16 + 1, 16)
        rows = []
        for start, end in chunks:
            batch = sequence_batch(ids[start:end], start, 1024, block_size)
            last = np.arange(max(end - start - 2, 0), end - start, dtype=np.int32)
            batch = replace(batch, sample_rows=last)
            executor.run_trunk(batch if own is None else own.batch(batch))
            logits = executor.run_head(batch, 0, len(last))
            rows.append(torch.as_tensor(logits).clone().numpy())
        return np.concatenate(rows)

    def of_rank(group: InProcessRank) -> Float32s:
        own = shard(program, degree=2, rank=group.rank, context=2)
        exchange = ByTurns(group, rank=group.rank, degree=2)
        pieces = OwnPieces(ranks=2, rank=group.rank, block_size=16)
        with ByTurns.turn:
            executor = kernel_rank(folder, own, exchange, limits)
            return run(executor, pieces.engine_block_size, pieces)

    whole = run(kernel_rank(folder, program, None, limits), 16, None)
    for found in on_all_ranks(InProcessGroup(2, timeout_s=300.0).ranks(), of_rank):
        np.testing.assert_array_equal(found, whole, strict=True)


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_a_share_of_a_product_has_the_bits_of_the_whole(
    dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear_fixed, "FILL", 4)
    kind_of = {"f32": torch.float32, "bf16": torch.bfloat16}[dtype]
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(128, 1024, generator=generator).to(kind_of)
    x = torch.randn(3, 1024, generator=generator).to(kind_of)

    def product(rows: slice, undivided: int, elements: int) -> Tensor:
        y = torch.empty(3, len(weight[rows]), dtype=torch.float32)
        workspace = linear_fixed.Workspace.of(elements, "cpu") if elements else None
        linear_fixed.linear(x, weight[rows], y, workspace=workspace, undivided=undivided)
        return y

    whole = product(slice(0, 128), 0, 0)
    for share in (slice(0, 64), slice(64, 128), slice(96, 128)):
        for elements in (0, 1 << 16):
            assert torch.equal(product(share, 128, elements), whole[:, share])
    assert not torch.equal(product(slice(0, 64), 0, 0), whole[:, :64])


# ---- refusals and a server


def test_memory_is_that_of_all_ranks_on_a_machine_and_of_one_on_a_gpu_each(tied: Path) -> None:
    program = small(program_of(tied, DType.BF16))
    one = torch_class.TorchExecutorClass(CPU).memory_for(program, LIMITS)
    two = divided(2).memory_for(program, LIMITS)
    assert two.token_bytes == one.token_bytes
    assert two.weights_bytes > one.weights_bytes
    device = replace(kind().settings, device="meta")  # of its own memory
    apart = RankedExecutorClass(degree=2, kind=TorchRanks(settings=device))
    largest = apart.memory_for(program, LIMITS)
    assert largest.token_bytes == one.token_bytes // 2
    assert largest.weights_bytes < one.weights_bytes
    assert isinstance(apart.kind, TorchRanks)
    parts = [apart.kind.memory_for(own, LIMITS) for own in apart.programs(program)]
    assert largest.step_bytes == max(part.step_bytes for part in parts), "segments are the host's"
    assert largest.exchange_bytes == 0
    by_nccl = replace(apart.kind, settings=replace(device, transport="nccl"))
    assert replace(apart, kind=by_nccl).memory_for(program, LIMITS).exchange_bytes == NCCL_BYTES
    assert by_nccl.memory_for(program, LIMITS).exchange_bytes == 0, "one rank exchanges nothing"


def test_what_the_executor_does_not_compute_is_refused_by_name(tied: Path, mixture: Path) -> None:
    """Experts in fp8, on any device; mixtures and pieces of positions are computed."""
    card = TorchExecutorClass(torch.device("cuda", 0))
    card.check_program(program_of(mixture, DType.BF16, "int4"))
    ranks = TorchRanks(settings=replace(kind().settings, device="cuda:0"))
    own, _ = RankedExecutorClass(degree=2, context=2, kind=ranks).programs(
        program_of(tied, DType.BF16)
    )
    ranks.check_program(own)
    with pytest.raises(ModelError, match=r"experts are kept in fp8.*--quantization int8"):
        ONE.check_program(program_of(mixture, DType.BF16, "fp8"))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["dead", "hung"])
def test_a_lost_rank_is_an_error_of_every_open_stream(
    number: signal.Signals, tmp_path: Path
) -> None:
    model = write_tiny_llama(tmp_path, seed=5, max_position_embeddings=32768, **HEADS)
    flags = ("--tensor-parallel-size", "2", "--executor", "torch", "--device", "cpu")
    check_lost_rank(model, flags, number)
