"""Taps: which states are handed out, and that nothing else of a program changes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from quire.execute.executor import Executor, ExecutorOptions, StepLimits
from quire.execute.native import NativeExecutor
from quire.execute.reference import ReferenceExecutor
from quire.models.registry import FAMILIES, build_program, open_model
from quire.program.batch import CacheRows, ForwardBatch
from quire.program.cost import StepShape
from quire.program.ops import Tap
from quire.program.program import Program
from quire.program.serialize import from_plain, to_plain
from quire.program.table import format_program
from quire.program.taps import HEAD_INPUT, TAPS, with_head_input, with_taps
from quire.program.tensors import DType
from quire.weights.checkpoint import Checkpoint, open_checkpoint
from quire.weights.chosen_tensors import ChosenTensors
from quire.weights.dtypes import from_bf16_bits
from tests.models.cases_gemma import GEMMA3
from tests.models.cases_opt import AS_350M, BASE
from tests.tiny_models import write_tiny, write_tiny_llama

IDS = np.array([3, 9, 27, 81, 5, 6], np.int32)
LIMITS = StepLimits(max_tokens=8, max_samples=8, max_sequences=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("taps"), seed=5, num_hidden_layers=3)


@pytest.fixture(scope="module")
def program(folder: Path) -> Program:
    return build_program(open_model(folder), dtype=DType.F32, max_positions=64)


def batch(*, keeps_taps: bool = True) -> ForwardBatch:
    numbers = np.arange(len(IDS), dtype=np.int32)
    return ForwardBatch(
        token_ids=IDS,
        positions=numbers,
        rope_positions=numbers,
        caches=(CacheRows(kv_slots=numbers, block_tables=np.zeros((1, 1), np.int32)),),
        seq_starts=np.array([0, len(IDS)], np.int32),
        sample_rows=numbers,
        keeps_taps=keeps_taps,
    )


def logits_of(executor: Executor) -> NDArray[np.float32]:
    executor.allocate_cache(1, 16)
    executor.run_trunk(batch(), head_rows=len(IDS))
    return executor.run_head(batch(), 0, len(IDS)).copy()


def executors(program: Program, checkpoint: Checkpoint) -> tuple[NativeExecutor, ReferenceExecutor]:
    options = ExecutorOptions(limits=LIMITS)
    return (
        NativeExecutor(program, checkpoint, options, poison=True),
        ReferenceExecutor(program, checkpoint, options),
    )


@pytest.mark.parametrize("dtype", list(DType))
def test_taps_are_the_streams_and_change_no_bit(folder: Path, dtype: DType) -> None:
    plain = build_program(open_model(folder), dtype=dtype, max_positions=64)
    tapped = with_head_input(with_taps(plain, (2, 0)))
    checkpoint = open_checkpoint(folder)
    for before, after in zip(
        executors(plain, checkpoint), executors(tapped, checkpoint), strict=True
    ):
        assert np.array_equal(logits_of(before), logits_of(after))
        taps = after.output(TAPS, len(IDS))
        assert taps.shape == (len(IDS), 120)
        # The last layer's stream is what leaves the trunk.
        assert np.array_equal(taps[:, :60], after.output("hidden", len(IDS)))
        assert np.isfinite(taps).all()
        read = after.output(HEAD_INPUT, len(IDS))
        read = from_bf16_bits(read) if read.dtype == np.uint16 else read
        assert read.shape == (len(IDS), 60)


def test_the_stream_after_a_layer_is_what_a_model_of_so_many_layers_leaves(
    folder: Path, program: Program, tmp_path: Path
) -> None:
    native, reference = executors(with_taps(program, (0, 1)), open_checkpoint(folder))
    logits_of(native), logits_of(reference)
    whole = open_checkpoint(folder)
    for layers in (1, 2):
        # The same seed draws other tensors for fewer layers, so these come from the larger model.
        small = build_program(
            open_model(write_tiny_llama(tmp_path / str(layers), num_hidden_layers=layers)),
            dtype=DType.F32,
            max_positions=64,
        )
        chosen = ChosenTensors(folder, {name: (whole, name) for name in small.source_shapes()})
        alone, _ = executors(small, chosen)
        logits_of(alone)
        part = slice(60 * (layers - 1), 60 * layers)
        wanted = alone.output("hidden", len(IDS))
        assert np.array_equal(native.output(TAPS, len(IDS))[:, part], wanted)
        np.testing.assert_allclose(
            reference.output(TAPS, len(IDS))[:, part], wanted, rtol=1e-4, atol=1e-4
        )


def test_a_tapped_program_is_printed_counted_and_sent_like_others(program: Program) -> None:
    tapped = with_taps(program, (0, 2))
    assert from_plain(to_plain(tapped)) == tapped
    assert format_program(tapped, StepShape([5], [0]), all_layers=True).count("taps.") == 2
    step = StepShape([5], [0])
    more = tapped.step_cost(step).buffer_bytes - program.step_cost(step).buffer_bytes
    assert more == 2 * 2 * 5 * 60 * 4  # read and written, two layers
    assert sum(isinstance(op, Tap) for op in tapped.segments["trunk"]) == 2
    head = with_head_input(program)
    assert (head.segments, head.buffers) == (program.segments, program.buffers)


def test_steps_that_keep_no_taps_compute_none_and_all_else_alike(
    folder: Path, program: Program
) -> None:
    """Whatever the step before kept. The output of a tap that is not kept is any memory."""
    for executor in executors(with_taps(program, (2, 0)), open_checkpoint(folder)):
        whole = logits_of(executor)
        taps = executor.output(TAPS, len(IDS)).copy()
        resting, keeping = batch(keeps_taps=False), batch()
        executor.run_trunk(resting, head_rows=len(IDS))
        assert np.array_equal(executor.run_head(resting, 0, len(IDS)), whole)
        assert not (executor.output(TAPS, len(IDS)) == taps).any()
        for first in range(executor.num_layers):
            executor.run_layers(resting, first, first + 1)
        executor.run_trunk(keeping)
        assert np.array_equal(executor.output(TAPS, len(IDS)), taps)


@pytest.mark.parametrize("layers", [(), (3,), (-1,), (1, 1)])
def test_layers_that_are_not_there_are_refused(program: Program, layers: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="has the layers 0 to 2, and each may be given once"):
        with_taps(program, layers)


def test_families_with_norms_around_their_sublayers_are_tapped(tmp_path: Path) -> None:
    size = {"vocab_size": 307, "max_position_embeddings": 512}
    folder = write_tiny(tmp_path, GEMMA3 | size, seed=2)
    program = build_program(open_model(folder), dtype=DType.F32, max_positions=64)
    last = len(program.layer_starts) - 1
    native, _ = executors(with_taps(program, (0, last)), open_checkpoint(folder))
    logits_of(native)
    taps, width = native.output(TAPS, len(IDS)), program.outputs["hidden"].width
    assert np.array_equal(taps[:, width:], native.output("hidden", len(IDS)))
    assert not np.array_equal(taps[:, :width], taps[:, width:])
    assert "Gemma3ForCausalLM" in FAMILIES


def test_a_stream_that_is_normed_at_each_sum_is_not_tapped(tmp_path: Path) -> None:
    size = {"vocab_size": 307, "max_position_embeddings": 512}
    folder = write_tiny(tmp_path, BASE | AS_350M | size, seed=2)
    program = build_program(open_model(folder), dtype=DType.F32, max_positions=64)
    with pytest.raises(ValueError, match="layer 0 does not add to the stream"):
        with_taps(program, (0,))
    assert with_head_input(program).outputs[HEAD_INPUT].width == 35
