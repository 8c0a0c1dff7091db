"""Sources of weights: parts, transposed tensors, names without a prefix; and rejections."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.base.errors import WeightsError
from quire.execute.executor import ExecutorOptions, StepLimits
from quire.execute.native import NativeExecutor
from quire.execute.reference import ReferenceExecutor
from quire.models.registry import build_program, open_model
from quire.program.builder import ProgramBuilder
from quire.program.declarations import CacheSpec, Weight, WeightForm, WeightPart
from quire.program.program import Program
from quire.program.tensors import DType
from quire.weights.binding import Binding, bind
from quire.weights.checkpoint import open_checkpoint
from tests.models.generate import sequence_batch
from tests.safetensors_writer import encode, write_raw, write_safetensors
from tests.tiny_models import write_tiny_llama

Tensors = dict[str, Any]
EMBED, FUSED, POSITIONS = "core.embed.weight", "core.fused.weight", "core.positions.weight"


def program(**changes: Any) -> Program:
    """Learned positions after two unused rows; one product of a transposed tensor in three
    parts.
    """
    p = ProgramBuilder("Odd", dtype=DType.F32)
    p.cache(CacheSpec("paged", 1, 1, 4, DType.F32))
    embed = p.matrix("embed", [WeightPart("embed", EMBED, 9)], 8)
    x = p.embed(embed)
    table = p.table("positions", WeightPart("p", POSITIONS, 5, first_row=2, of_rows=7), 8)
    p.add(x, p.embed(table, ids="positions"))
    cut = {"of_rows": 13, "transposed": True} | changes
    parts = [
        WeightPart("a", FUSED, 4, first_row=0, **cut),
        WeightPart("b", FUSED, 3, first_row=4, **cut),
        WeightPart("c", FUSED, 2, first_row=10, **cut),
    ]
    bias = [WeightPart("a", "core.fused.bias", 9, first_row=4, of_rows=13)]
    h = p.linear(x, p.matrix("fused", parts, 8), bias=p.vector("fused.bias", bias))
    p.norm(h, p.vector("norm", [WeightPart("norm", "core.norm.weight", 9)]), eps=1e-5)
    p.output("logits", p.linear(p.begin_head(x), embed, dtype=DType.F32))
    return p.build(vocab_size=9, max_positions=5)


def tensors() -> Tensors:
    rng = np.random.default_rng(4)
    shapes = {
        EMBED: (9, 8), POSITIONS: (7, 8), FUSED: (8, 13), "core.fused.bias": (13,),
        "core.norm.weight": (9,),
    }  # fmt: skip
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def bound(folder: Path, held: Tensors) -> Binding:
    write_safetensors(folder / "model.safetensors", held)
    return bind(program(), open_checkpoint(folder))


def refused(folder: Path, held: Tensors) -> str:
    with pytest.raises(WeightsError) as caught:
        bound(folder, held)
    return str(caught.value)


def test_a_part_is_read_in_place(tmp_path: Path) -> None:
    held = tensors()
    binding, weights = bound(tmp_path, held), program().weights
    found = [binding.read_f32(part) for part in weights["fused"].parts]
    columns = [held[FUSED][:, 0:4], held[FUSED][:, 4:7], held[FUSED][:, 10:12]]
    for one, right in zip(found, columns, strict=True):
        np.testing.assert_array_equal(one, right.T)
    (part,) = weights["positions"].parts
    np.testing.assert_array_equal(binding.read_f32(part), held[POSITIONS][2:])
    (part,) = weights["fused.bias"].parts
    np.testing.assert_array_equal(binding.read_f32(part), held["core.fused.bias"][4:])


@pytest.mark.parametrize("stored", ["f32", "f16", "bf16"])
def test_both_executors_hold_the_selected_rows_and_digest_whole_tensors(
    stored: str, tmp_path: Path
) -> None:
    write_safetensors(tmp_path / "model.safetensors", tensors(), dtype=stored)
    checkpoint = open_checkpoint(tmp_path)
    limits = StepLimits(max_tokens=8, max_samples=8, max_sequences=1)
    native = NativeExecutor(program(), checkpoint, ExecutorOptions(limits=limits), poison=True)
    reference = ReferenceExecutor(program(), checkpoint, ExecutorOptions(limits=limits))
    assert native.weights_digest == reference.weights_digest
    logits = []
    for executor in (native, reference):
        executor.allocate_cache(4, 16)
        batch = sequence_batch([3, 1, 8, 0], 0, 16)
        executor.run_trunk(batch)
        logits.append(executor.run_head(batch, 0, 4).copy())
    np.testing.assert_allclose(logits[0], logits[1], rtol=1e-5, atol=1e-5)
    held = {name: checkpoint.read_f32(name) for name in checkpoint.names}
    stream = held[EMBED][[3, 1, 8, 0]] + held[POSITIONS][2:6]
    np.testing.assert_allclose(logits[1], stream @ held[EMBED].T, rtol=1e-4, atol=1e-4)
    fused = reference._weights["fused"]
    np.testing.assert_array_equal(fused, held[FUSED].T[[0, 1, 2, 3, 4, 5, 6, 10, 11]])


def test_an_unused_row_is_digested_too(tmp_path: Path) -> None:
    digests = set()
    for index, column in enumerate((0, 9, 12)):  # the last two are in no part
        changed = tensors()
        changed[FUSED][3, column] += 1
        folder = tmp_path / str(index)
        folder.mkdir()
        write_safetensors(folder / "model.safetensors", changed)
        checkpoint = open_checkpoint(folder)
        for make in (NativeExecutor, ReferenceExecutor):
            executor = make(
                program(),
                checkpoint,
                ExecutorOptions(limits=StepLimits(max_tokens=1, max_samples=1, max_sequences=1)),
            )
            digests.add(executor.weights_digest)
    assert len(digests) == 3


def test_names_without_the_common_prefix_are_found(tmp_path: Path) -> None:
    bare = {name.removeprefix("core."): values for name, values in tensors().items()}
    binding = bound(tmp_path, bare)
    (part,) = program().weights["embed"].parts
    assert binding.tensor(part).name == "embed.weight"
    np.testing.assert_array_equal(binding.read_f32(part), bare["embed.weight"])


def test_problems_are_reported_by_the_files_names(tmp_path: Path) -> None:
    bare = {name.removeprefix("core."): values for name, values in tensors().items()}
    bare["norm.weight"] = bare["norm.weight"][:3]
    message = refused(tmp_path, bare)
    assert "- norm.weight has shape [3]" in message
    assert "1 problem" in message


def test_a_file_of_another_model_is_reported_in_full_names(tmp_path: Path) -> None:
    message = refused(tmp_path, {"other.weight": np.ones(3, np.float32)})
    assert f"{EMBED} is missing" in message
    assert "other.weight (shape [3]) is not part of Odd" in message


def test_a_file_with_both_kinds_of_names_is_rejected(tmp_path: Path) -> None:
    held = tensors()
    held["fused.weight"] = held.pop(FUSED)
    message = refused(tmp_path, held)
    assert f"{FUSED} is missing (shape [8, 13] is needed)" in message
    assert "fused.weight (shape [8, 13]) is not part of Odd" in message


def test_an_unexpectedly_transposed_tensor_is_rejected(tmp_path: Path) -> None:
    held = tensors()
    held[FUSED] = np.ascontiguousarray(held[FUSED].T)
    message = refused(tmp_path, held)
    assert f"{FUSED} has shape [13, 8]; config.json asks for [8, 13]" in message


def test_a_copy_of_the_tied_embedding_is_accepted_under_any_name_of_the_embedding(
    tmp_path: Path,
) -> None:
    held = tensors()
    bound(tmp_path, held | {"lm_head.weight": held[EMBED]})
    message = refused(tmp_path, held | {"lm_head.weight": held[EMBED] + 1})
    assert f"lm_head.weight differs from {EMBED}" in message


def test_masks_of_old_files_are_ignored_whatever_their_type(tmp_path: Path) -> None:
    held = tensors()
    masks = {
        "core.h.0.attn.bias": ("U8", (1, 1, 4, 4)),
        "core.h.11.attn.masked_bias": ("BOOL", ()),
    }
    _write_with_masks(tmp_path, held, masks)
    bind(program(), open_checkpoint(tmp_path))
    _write_with_masks(tmp_path, held, {"core.mask": ("U8", (1, 1, 4, 4))})
    with pytest.raises(WeightsError, match=r"core\.mask \(shape \[1, 1, 4, 4\]\) is not part of"):
        bind(program(), open_checkpoint(tmp_path))


def with_layers(folder: Path, extra: Tensors, **config: Any) -> Binding:
    """Bind a Llama of two layers with further tensors."""
    model = write_tiny_llama(folder, num_hidden_layers=2, **config)
    held = {name: checkpoint_tensor(model, name) for name in open_checkpoint(model).names}
    write_safetensors(model / "model.safetensors", held | extra)
    spec = open_model(model)
    program = build_program(spec, dtype=DType.F32, max_positions=spec.max_positions)
    return bind(program, open_checkpoint(model))


def checkpoint_tensor(model: Path, name: str) -> np.ndarray[Any, Any]:
    return open_checkpoint(model).read_f32(name)


MTP = {
    "model.layers.2.eh_proj.weight": np.ones((4, 8), np.float32),
    "model.layers.2.enorm.weight": np.ones(4, np.float32),
    "model.layers.2.self_attn.q_proj.weight": np.ones((4, 4), np.float32),
    "model.layers.2.shared_head.norm.weight": np.ones(4, np.float32),
}


NAMED_MTP = {
    "mtp.fc.weight": np.ones((4, 8), np.float32),
    "mtp.layers.0.self_attn.q_proj.weight": np.ones((4, 4), np.float32),
    "model.mtp_layers.0.self_attn.q_proj.weight": np.ones((4, 4), np.float32),
    "model.mtp_emb_norm.0.weight": np.ones(4, np.float32),
}


@pytest.mark.parametrize("more", [MTP, NAMED_MTP, MTP | NAMED_MTP])
def test_layers_that_predict_further_tokens_are_passed_over(tmp_path: Path, more: Tensors) -> None:
    with_layers(tmp_path / "m", more, num_nextn_predict_layers=1)


def test_a_name_that_only_begins_as_one_of_such_layers_is_not_passed_over(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"mtpx\.fc\.weight .* not part of"):
        with_layers(tmp_path / "m", {"mtpx.fc.weight": np.ones((4, 8), np.float32)})


def test_a_layer_too_many_is_none_that_predicts_further_tokens(tmp_path: Path) -> None:
    third = {"model.layers.2.self_attn.q_proj.weight": np.ones((4, 4), np.float32)}
    with pytest.raises(WeightsError, match=r"layers.2.self_attn.q_proj.weight .* not part of"):
        with_layers(tmp_path / "m", third)
    more = {name.replace("2.", "3.", 1): tensor for name, tensor in MTP.items()}
    norm = {"model.layers.2.input_layernorm.weight": np.ones(4, np.float32)}
    with pytest.raises(WeightsError, match=r"there are weights of 3 layers, .* asks for 2"):
        with_layers(tmp_path / "n", third | norm | more)


def test_a_weight_of_a_masks_type_is_rejected(tmp_path: Path) -> None:
    held = tensors()
    del held["core.norm.weight"]
    _write_with_masks(tmp_path, held, {"core.norm.weight": ("U8", (9,))})
    with pytest.raises(WeightsError, match=r"core\.norm\.weight is u8; f32, f16 and bf16 are"):
        bind(program(), open_checkpoint(tmp_path))


def _write_with_masks(
    folder: Path, held: Tensors, masks: dict[str, tuple[str, tuple[int, ...]]]
) -> None:
    """Write F32 tensors, then masks of ones of one byte each."""
    header: dict[str, Any] = {}
    body = b""
    for name, values in held.items():
        raw = encode(values, "f32")
        offsets = [len(body), len(body) + len(raw)]
        header[name] = {"dtype": "F32", "shape": list(values.shape), "data_offsets": offsets}
        body += raw
    for name, (dtype, shape) in masks.items():
        raw = b"\1" * int(np.prod(shape, dtype=int))
        offsets = [len(body), len(body) + len(raw)]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": offsets}
        body += raw
    write_raw(folder / "model.safetensors", json.dumps(header).encode(), body)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"of_rows": 11}, r"part c: rows 10 to 12 of 11"),
        ({"of_rows": 0}, r"is \[8, 4\] here and \[8, 2\] elsewhere"),
    ],
)
def test_a_program_that_reads_beyond_a_source_is_rejected(
    changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        program(**changes)


def test_a_program_with_contradictory_parts_is_rejected() -> None:
    right = program()
    other = Weight("other", WeightForm.TABLE, (WeightPart("x", FUSED, 13),), 8, DType.F32)
    with pytest.raises(ValueError, match=r"is \[8, 13\] here and \[13, 8\] elsewhere"):
        replace(right, weights={**right.weights, "other": other})
    turned = WeightPart("x", "v", 13, transposed=True)
    vector = Weight("other", WeightForm.VECTOR, (turned,), 0, DType.F32)
    with pytest.raises(ValueError, match="a vector cannot be transposed"):
        replace(right, weights={**right.weights, "other": vector})
