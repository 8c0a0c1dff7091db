"""Sizes of captured steps: few for any workload, with room for every planned step."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from bench.gpu.batches import batch_of, columns_for  # noqa: E402
from bench.gpu.models import SHAPES  # noqa: E402
from quire.execute.executor import StepLimits  # noqa: E402
from quire.execute.gpu.attention_steps import AttentionSteps  # noqa: E402
from quire.execute.gpu.step_sizes import (  # noqa: E402
    MAX_MIXED,
    Size,
    Sizes,
    ladder,
    max_mixed,
    mixed_ladder,
)
from quire.models.registry import build_program, open_model  # noqa: E402
from quire.program.batch import ForwardBatch  # noqa: E402
from quire.program.program import Program  # noqa: E402
from quire.program.tensors import DType  # noqa: E402

pytestmark = pytest.mark.gpu

LIMITS = StepLimits(max_tokens=4096, max_samples=256, max_sequences=256)


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Program]:
    """Return the programs of the measured models."""
    return {name: _program(name, tmp_path_factory.mktemp("shape")) for name in SHAPES}


def _program(name: str, folder: Path) -> Program:
    (folder / "config.json").write_text(json.dumps(dict(SHAPES[name])), encoding="utf-8")
    spec = open_model(folder)
    return build_program(spec, dtype=DType.BF16, max_positions=spec.max_positions)


def drawn_batch(rng: np.random.Generator, max_tokens: int) -> ForwardBatch:
    """Return a mixed step of at most `num_tokens` tokens: decode rows and chunks in any order."""
    chunks = rng.integers(1, rng.choice([2, 6, 40]))
    counts = [1] * int(rng.integers(0, min(max_tokens, 256 - chunks)))
    for _ in range(chunks):
        room = max_tokens - sum(counts)
        if room < 2:
            break
        counts.append(int(rng.integers(2, rng.choice([3, room + 1]) if room > 2 else 3)))
    if max(counts, default=0) < 2:
        counts = [*counts[: max_tokens - 2], 2]
    rng.shuffle(counts)
    starts = rng.integers(0, rng.choice([1, 300, 9000]), len(counts)).tolist()
    columns = columns_for(max(np.add(counts, starts)))
    return batch_of(counts, starts, columns=columns, vocab_size=100, samples=True)


@pytest.mark.parametrize("most", [1, 3, 16, 100, 256, 600, 2000])
def test_a_ladder_ends_at_the_maximum_and_pads_little(most: int) -> None:
    assert list(ladder(most)) == sorted(set(ladder(most)))
    sizes = Sizes(StepLimits(max_tokens=9999, max_samples=most, max_sequences=most), mixed=0)
    assert (sizes.ones[0], sizes.ones[-1]) == (1, most)
    for rows in range(1, most + 1):
        size = sizes.of(batch_of([1] * rows, [0] * rows, columns=1, vocab_size=9, samples=True))
        assert size == Size(size.tokens, size.tokens)
        assert rows <= size.tokens <= most
        assert size.tokens - rows <= max(rows, 64)


def test_no_size_has_more_rows_than_a_step_allows() -> None:
    """With fewer tokens than sequences allowed in a step."""
    sizes = Sizes(StepLimits(max_tokens=98, max_samples=256, max_sequences=256), mixed=4096)
    assert sizes.ones[-1] == 98
    assert sizes.mixed[-1] == 96


@pytest.mark.parametrize("most", [0, 15, 16, 17, 64, 250, 1000, 2048])
def test_mixed_sizes_are_few_and_multiples_of_16(most: int) -> None:
    sizes = mixed_ladder(most)
    assert list(sizes) == sorted(set(sizes))
    assert not any(size % 16 for size in sizes)
    assert sizes == () if most < 16 else most - 16 < sizes[-1] <= most
    assert all(after <= 2 * size for size, after in pairwise(sizes))
    assert len(sizes) <= 2 * max(most, 1).bit_length()


def test_small_models_capture_larger_steps(programs: dict[str, Program]) -> None:
    """As long as launches on the host take longer than products on the device."""
    most = {name: max_mixed(program, 9 * 30) for name, program in programs.items()}
    assert most["Qwen3-0.6B"] == MAX_MIXED
    assert 512 < most["Llama-3.1-8B"] < 1024


def test_every_plan_fits_its_captured_size(programs: dict[str, Program]) -> None:
    """Holds for every step of a size, and there are few sizes."""
    rng, seen = np.random.default_rng(7), set()
    sizes = Sizes(LIMITS, mixed=MAX_MIXED)
    for program in (programs["Llama-3.1-8B"], programs["Qwen3-0.6B"]):
        steps = AttentionSteps(program, limits=LIMITS, exact=False, programs=528)
        room = steps.sizes()
        planned: dict[Size, dict[str, int]] = {}
        for number in range(400):
            batch = drawn_batch(rng, int(rng.choice([16, 64, 300, 2048, LIMITS.max_tokens])))
            size = sizes.of(batch)
            assert size is not None, number
            assert len(batch.token_ids) <= size.tokens
            assert len(batch.seq_starts) - 1 <= size.sequences <= size.tokens
            lengths = {name: len(part) for name, part in steps.plan(batch, size=size).items()}
            assert planned.setdefault(size, lengths) == lengths
            assert all(length <= room[name] for name, length in lengths.items())
        seen |= set(planned)
    usual = {size for size in seen if size.chunks <= 16}
    assert usual <= set(sizes.all_mixed())
    assert len(list(sizes.all_mixed())) <= 50
    assert len(seen) > 30
