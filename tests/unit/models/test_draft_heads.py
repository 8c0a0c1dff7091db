"""Programs of draft heads against plain NumPy written from the papers, on both executors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from quire.execute.executor import ExecutorOptions, StepLimits
from quire.execute.native import NativeExecutor
from quire.execute.reference import ReferenceExecutor
from quire.models.config_reader import ConfigReader, load_config
from quire.models.eagle import (
    EACH_NORM,
    EMBEDDING,
    FUSE,
    INPUT_NORM,
    SOURCES,
    build_eagle,
    build_fuse,
    read_eagle,
    usual_taps,
)
from quire.models.medusa import build_medusa_head, head_tensors, read_medusa
from quire.program.batch import CacheRows, ForwardBatch
from quire.program.program import Program
from quire.program.tensors import DType
from quire.weights.checkpoint import Checkpoint, open_checkpoint
from quire.weights.chosen_tensors import ChosenTensors
from tests.draft_heads import (
    EAGLE_HEAD_DIM,
    EAGLE_HEADS,
    eagle_tensors,
    medusa_tensors,
    write_eagle,
    write_medusa,
)

Floats = NDArray[np.float64]
WIDTH, VOCAB, ROWS = 60, 307, 9
EXECUTORS = [ReferenceExecutor, NativeExecutor]


def batch_of(token_ids: NDArray[np.int32], features: Floats) -> ForwardBatch:
    numbers = np.arange(ROWS, dtype=np.int32)
    return ForwardBatch(
        token_ids=token_ids,
        positions=numbers,
        rope_positions=numbers,
        caches=(CacheRows(kv_slots=numbers, block_tables=np.zeros((1, 1), np.int32)),),
        seq_starts=np.array([0, ROWS], np.int32),
        sample_rows=numbers,
        features=features.astype(np.float32),
    )


def run(make: Any, program: Program, checkpoint: Checkpoint, batch: ForwardBatch) -> Any:
    limits = StepLimits(max_tokens=16, max_samples=16, max_sequences=1)
    executor = make(program, checkpoint, ExecutorOptions(limits=limits))
    if program.caches:
        executor.allocate_cache(1, 16)
    executor.run_trunk(batch)
    return executor


def reader(folder: Path) -> ConfigReader:
    return ConfigReader(load_config(folder / "config.json"), where=str(folder))


def silu(x: Floats) -> Floats:
    return x / (1 + np.exp(-x))


def norm(x: Floats, weight: NDArray[Any]) -> Floats:
    result: Floats = x / np.sqrt(np.mean(x**2, -1, keepdims=True) + 1e-5) * weight
    return result


def rotated(x: Floats) -> Floats:
    """Rotate [T, heads, D] by 10000^(-2i / D) for each position."""
    half = x.shape[-1] // 2
    angles = np.arange(len(x))[:, None, None] * 10_000.0 ** (-np.arange(half) / half)
    one, two = x[..., :half], x[..., half:]
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate((one * cos - two * sin, two * cos + one * sin), -1)


def eagle_by_hand(
    tensors: dict[str, NDArray[Any]], embedded: Floats, hidden: Floats, *, norms_residual: bool
) -> tuple[Floats, Floats]:
    """Return logits and the stream that is fed back."""
    weights = {name: np.asarray(value, np.float64) for name, value in tensors.items()}
    layer = {name.removeprefix("midlayer."): value for name, value in weights.items()}
    normed = norm(hidden, layer["hidden_norm.weight"])
    both = np.concatenate((norm(embedded, layer["input_layernorm.weight"]), normed), -1)
    residual = normed if norms_residual else hidden
    parts = {name: both @ layer[f"self_attn.{name}_proj.weight"].T for name in "qkv"}
    q = rotated(parts["q"].reshape(ROWS, EAGLE_HEADS, EAGLE_HEAD_DIM))
    k = rotated(parts["k"].reshape(ROWS, 1, EAGLE_HEAD_DIM))[:, 0]
    attended = np.zeros((ROWS, EAGLE_HEADS, EAGLE_HEAD_DIM))
    for row in range(ROWS):
        scores = q[row] @ k[: row + 1].T / np.sqrt(EAGLE_HEAD_DIM)
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        attended[row] = shares / shares.sum(-1, keepdims=True) @ parts["v"][: row + 1]
    x = residual + attended.reshape(ROWS, -1) @ layer["self_attn.o_proj.weight"].T
    h = norm(x, layer["post_attention_layernorm.weight"])
    gated = silu(h @ layer["mlp.gate_proj.weight"].T) * (h @ layer["mlp.up_proj.weight"].T)
    x = x + gated @ layer["mlp.down_proj.weight"].T
    return norm(x, weights["norm.weight"]) @ weights["lm_head.weight"].T, x


@pytest.mark.parametrize("make", EXECUTORS)
@pytest.mark.parametrize("norms_residual", [False, True])
def test_the_eagle_layer_is_that_of_the_paper(
    tmp_path: Path, make: Any, norms_residual: bool
) -> None:
    rng = np.random.default_rng(2)
    tensors = eagle_tensors(hidden_size=WIDTH, vocab_size=VOCAB)
    tensors[EMBEDDING] = rng.normal(0, 1, (VOCAB, WIDTH)).astype(np.float32)
    folder = write_eagle(
        tmp_path, tensors, vocab_size=VOCAB, norm_before_residual=norms_residual or None
    )
    spec, stored = read_eagle(reader(folder)), open_checkpoint(folder)
    token_ids = rng.integers(0, VOCAB, ROWS).astype(np.int32)
    states = rng.normal(0, 1, (ROWS, 3 * WIDTH))
    fuse = build_fuse(spec, columns=3 * WIDTH, vocab_size=VOCAB, dtype=DType.F32)
    chosen = ChosenTensors(folder, {FUSE: (stored, FUSE)})
    fused = run(make, fuse, chosen, batch_of(token_ids, states)).output("hidden", ROWS).copy()
    np.testing.assert_allclose(fused, states @ tensors[FUSE].T, rtol=1e-4, atol=1e-4)
    layer = build_eagle(spec, vocab_size=VOCAB, dtype=DType.F32, max_positions=64)
    chosen = ChosenTensors(folder, {ours: (stored, name) for name, ours in SOURCES.items()})
    batch = batch_of(token_ids, fused)
    executor = run(make, layer, chosen, batch)
    logits, hidden = eagle_by_hand(
        tensors,
        tensors[EMBEDDING][token_ids].astype(np.float64),
        fused.astype(np.float64),
        norms_residual=norms_residual,
    )
    np.testing.assert_allclose(executor.output("hidden", ROWS), hidden, rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(executor.run_head(batch, 0, ROWS), logits, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("make", EXECUTORS)
@pytest.mark.parametrize("key", ["norm_before_fc", "fc_norm"])
def test_hidden_states_are_normed_before_fc(tmp_path: Path, make: Any, key: str) -> None:
    rng = np.random.default_rng(4)
    tensors = eagle_tensors(hidden_size=WIDTH, vocab_size=VOCAB)
    weights = rng.uniform(0.5, 1.5, 3 * WIDTH).astype(np.float32)
    if key == "norm_before_fc":
        tensors[INPUT_NORM] = weights
    else:
        tensors |= dict(zip(EACH_NORM, np.split(weights, 3), strict=True))
    folder = write_eagle(tmp_path, tensors, vocab_size=VOCAB, **{key: True})
    spec, stored = read_eagle(reader(folder)), open_checkpoint(folder)
    assert read_eagle(reader(folder), stored.names) == spec
    states = rng.normal(0, 1, (ROWS, 3, WIDTH)) * [[[1], [5], [0.2]]]
    fuse = build_fuse(spec, columns=3 * WIDTH, vocab_size=VOCAB, dtype=DType.F32)
    chosen = ChosenTensors(folder, {name: (stored, name) for name in spec.fuse_names})
    batch = batch_of(np.zeros(ROWS, np.int32), states.reshape(ROWS, -1))
    fused = run(make, fuse, chosen, batch).output("hidden", ROWS)
    whole = states.reshape(ROWS, -1)
    normed = norm(whole, weights)
    if key == "fc_norm":
        normed = norm(states, weights.reshape(3, WIDTH)).reshape(ROWS, -1)
    np.testing.assert_allclose(fused, normed @ tensors[FUSE].T, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("make", EXECUTORS)
def test_a_stream_is_fed_back_after_the_norm(tmp_path: Path, make: Any) -> None:
    rng = np.random.default_rng(5)
    tensors = eagle_tensors(hidden_size=WIDTH, vocab_size=VOCAB)
    tensors[EMBEDDING] = rng.normal(0, 1, (VOCAB, WIDTH)).astype(np.float32)
    folder = write_eagle(tmp_path, tensors, vocab_size=VOCAB, norm_output=True)
    spec, stored = read_eagle(reader(folder)), open_checkpoint(folder)
    token_ids = rng.integers(0, VOCAB, ROWS).astype(np.int32)
    fused = rng.normal(0, 1, (ROWS, WIDTH))
    layer = build_eagle(spec, vocab_size=VOCAB, dtype=DType.F32, max_positions=64)
    chosen = ChosenTensors(folder, {ours: (stored, name) for name, ours in SOURCES.items()})
    batch = batch_of(token_ids, fused)
    executor = run(make, layer, chosen, batch)
    embedded = tensors[EMBEDDING][token_ids].astype(np.float64)
    logits, hidden = eagle_by_hand(tensors, embedded, fused, norms_residual=False)
    fed = norm(hidden, tensors["norm.weight"])
    np.testing.assert_allclose(executor.output("hidden", ROWS), fed, rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(executor.run_head(batch, 0, ROWS), logits, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("make", EXECUTORS)
def test_later_layers_read_the_stream_alone(tmp_path: Path, make: Any) -> None:
    rng = np.random.default_rng(6)
    tensors = eagle_tensors(hidden_size=WIDTH, vocab_size=VOCAB)
    tensors[EMBEDDING] = rng.normal(0, 1, (VOCAB, WIDTH)).astype(np.float32)
    own = eagle_tensors(hidden_size=WIDTH, vocab_size=VOCAB, seed=7)
    for name, tensor in own.items():
        if name.startswith("midlayer.") and "hidden_norm" not in name:
            halved = tensor[:, :WIDTH] if tensor.shape[-1] == 2 * WIDTH else tensor
            tensors[name.replace("midlayer", "layers.1")] = np.ascontiguousarray(halved)
    folder = write_eagle(tmp_path, tensors, vocab_size=VOCAB, num_hidden_layers=2)
    spec, stored = read_eagle(reader(folder)), open_checkpoint(folder)
    token_ids = rng.integers(0, VOCAB, ROWS).astype(np.int32)
    fused = rng.normal(0, 1, (ROWS, WIDTH))
    program = build_eagle(spec, vocab_size=VOCAB, dtype=DType.F32, max_positions=64)
    chosen = ChosenTensors(
        folder, {ours: (stored, name) for name, ours in spec.layer_sources.items()}
    )
    batch = batch_of(token_ids, fused)
    executor = run(make, program, chosen, batch)
    embedded = tensors[EMBEDDING][token_ids].astype(np.float64)
    _, first = eagle_by_hand(tensors, embedded, fused, norms_residual=False)
    # The second layer is the first one's, with nothing where the embedding is.
    second = {
        name.replace("layers.1", "midlayer"): value
        for name, value in tensors.items()
        if not name.startswith("midlayer.")
    }
    for part in "qkv":
        weight = second[f"midlayer.self_attn.{part}_proj.weight"]
        none = np.zeros_like(weight)
        second[f"midlayer.self_attn.{part}_proj.weight"] = np.concatenate((none, weight), 1)
    second["midlayer.hidden_norm.weight"] = second["midlayer.input_layernorm.weight"]
    logits, hidden = eagle_by_hand(second, embedded, first, norms_residual=False)
    np.testing.assert_allclose(executor.output("hidden", ROWS), hidden, rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(executor.run_head(batch, 0, ROWS), logits, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("make", EXECUTORS)
def test_a_medusa_head_is_that_of_the_paper(tmp_path: Path, make: Any) -> None:
    tensors = medusa_tensors(hidden_size=WIDTH, vocab_size=VOCAB, num_heads=2, num_layers=2)
    folder = write_medusa(tmp_path, tensors, medusa_num_layers=2)
    spec, stored = read_medusa(reader(folder)), open_checkpoint(folder)
    states = np.random.default_rng(2).normal(0, 1, (ROWS, WIDTH))
    program = build_medusa_head(spec, hidden_size=WIDTH, vocab_size=VOCAB, dtype=DType.F32)
    for number, names in enumerate(head_tensors(spec, stored.names, "x")):
        chosen = ChosenTensors(folder, {name: (stored, theirs) for name, theirs in names.items()})
        batch = batch_of(np.zeros(ROWS, np.int32), states)
        x = states
        for layer in range(2):
            name = f"medusa_lm_head.{number}.{layer}.linear"
            x = x + silu(x @ tensors[f"{name}.weight"].T + tensors[f"{name}.bias"])
        wanted = x @ tensors[f"medusa_lm_head.{number}.2.weight"].T
        found = run(make, program, chosen, batch).run_head(batch, 0, ROWS)
        np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=1e-3)


def test_the_usual_layers_are_counted_as_published() -> None:
    # Before layers 2, n / 2 and n - 3: after those before them.
    assert usual_taps(32) == (1, 15, 28)
    with pytest.raises(Exception, match="the model has 5 layers, too few"):
        usual_taps(5)


def test_features_are_checked(tmp_path: Path) -> None:
    tensors = medusa_tensors(hidden_size=WIDTH, vocab_size=VOCAB, num_heads=1)
    folder = write_medusa(tmp_path, tensors)
    spec, stored = read_medusa(reader(folder)), open_checkpoint(folder)
    (names,) = head_tensors(spec, stored.names, "x")
    chosen = ChosenTensors(folder, {name: (stored, theirs) for name, theirs in names.items()})
    program = build_medusa_head(spec, hidden_size=WIDTH, vocab_size=VOCAB, dtype=DType.F32)
    wrong = batch_of(np.zeros(ROWS, np.int32), np.zeros((ROWS, WIDTH + 1)))
    with pytest.raises(ValueError, match=r"features are \[9, 61\]; \[9, 60\] are read"):
        run(ReferenceExecutor, program, chosen, wrong)
    with pytest.raises(ValueError, match="the batch's features have not the output's width"):
        run(NativeExecutor, program, chosen, wrong)
