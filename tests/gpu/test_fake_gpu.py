"""Whole steps on a fake GPU: operand devices, synchronizations and capturability.

Nothing is computed, but the checks are those of a real GPU.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from quire.execute.executor import StepLimits  # noqa: E402
from quire.execute.gpu import library_fp8  # noqa: E402
from quire.execute.gpu.executor import LaunchOptions, TorchExecutor  # noqa: E402
from quire.execute.gpu.load import load  # noqa: E402
from quire.execute.gpu.products import pack_ints  # noqa: E402
from quire.program.batch import CacheRows, ForwardBatch  # noqa: E402
from quire.program.tensors import DType  # noqa: E402
from quire.sampling.scoring import ScoreBatch  # noqa: E402
from quire.weights.binding import bind  # noqa: E402
from quire.weights.checkpoint import open_checkpoint  # noqa: E402
from tests.gpu.fake_gpu import CARD, Card, CardStream  # noqa: E402
from tests.gpu.torch_models import BLOCK_SIZE, CPU, program_of  # noqa: E402
from tests.kernels.sampling_cases import make_batch  # noqa: E402
from tests.tiny_models import write_tiny_llama  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::RuntimeWarning")]

COLUMNS, MOST = 24, 8
# Tokens of each sequence, and cached positions: decode, chunks, both.
STEPS = [([1], [0]), ([1, 1, 1], [5, 300, 17]), ([5], [0]), ([40, 1, 1], [0, 30, 2]), ([350], [9])]


def step(counts: list[int], starts: list[int]) -> ForwardBatch:
    seq_starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    owner = np.repeat(np.arange(len(counts)), counts)
    within = np.arange(seq_starts[-1]) - seq_starts[owner]
    positions = (np.array(starts)[owner] + within).astype(np.int32)
    return ForwardBatch(
        token_ids=np.zeros(len(positions), np.int32),
        positions=positions,
        rope_positions=positions,
        caches=(
            CacheRows(kv_slots=positions, block_tables=np.zeros((len(counts), COLUMNS), np.int32)),
        ),
        seq_starts=seq_starts,
        sample_rows=seq_starts[1:] - 1,
    )


def asked(executor: TorchExecutor, batch: ForwardBatch) -> None:
    """Run everything that the runner calls in one step."""
    rows = len(batch.sample_rows)
    executor.run_trunk(batch, head_rows=rows)
    logits = executor.run_head(batch, 0, rows)
    plain, slots = make_batch(rows, temperature=1.0), np.arange(rows, dtype=np.int32)
    history = [[1, 2]] * rows
    odd = make_batch(rows, top_k=5, num_logprobs=2, repetition_penalty=1.1, history=history)
    for params in (plain, odd):
        executor.sample_later(logits, params, slots)()
        executor.sample(logits, params)
    scores = ScoreBatch(
        targets=slots,
        num_top=np.ones(rows, np.int32),
        listed_starts=np.arange(rows + 1, dtype=np.int32),
        listed_ids=slots,
    )
    executor.score(logits, scores)
    executor.mark()()


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize(
    ("precision", "cache"),
    [("none", "auto"), ("fp8", "fp8"), ("fp8-block", "int8"), ("int8", "auto"), ("int4", "auto")],
)
def test_steps_stay_on_their_device_without_waits_and_can_be_captured(
    precision: str,
    cache: str,
    exact: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = write_tiny_llama(tmp_path, seed=5, dtype="bf16", num_hidden_layers=1)
    program = program_of(folder, DType.BF16, precision, cache)
    loaded = load(program, bind(program, open_checkpoint(folder)), CPU, None, pack=pack_ints)
    monkeypatch.setattr(library_fp8, "product_for", lambda *_, **__: None)  # it would probe the GPU
    card = Card(monkeypatch)
    with card.open():
        executor = TorchExecutor(
            program,
            card.weights(loaded),
            device=CARD,
            exact=exact,
            limits=StepLimits(max_tokens=512, max_samples=MOST, max_sequences=MOST),
            launch=LaunchOptions(stream=CardStream(card), capture=card.capture),
        )
        executor.allocate_cache(32, BLOCK_SIZE)
        for counts, starts in STEPS * 2:
            asked(executor, step(counts, starts))
        blocks = np.arange(6, dtype=np.int32)
        executor.copy_blocks(blocks[:2], blocks[2:4])
        raws = [np.zeros(executor.block_bytes, np.uint8) for _ in blocks]
        executor.begin_moving(4)
        executor.export_blocks(blocks, raws)()
        executor.import_blocks(blocks, raws)
        assert executor.steps_replayed >= 4
        executor.close()
    assert card.allocated == []
    assert "attention_items" in card.launched
