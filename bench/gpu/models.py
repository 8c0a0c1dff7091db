"""Models of known shapes with random weights, created on the device: nothing is loaded.

The shapes are of the published config.json files. Weights are small random numbers, so that
activations stay finite; the cost of a step does not depend on them.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from bench.gpu import absent
from bench.gpu.stage import Stage
from quire.execute.executor import StepLimits
from quire.execute.gpu.executor import LaunchOptions, TorchExecutor
from quire.execute.gpu.graphs import capture_of
from quire.execute.gpu.load import TORCH_TYPES, Fp8Weight, Loaded
from quire.models.registry import build_program, open_model
from quire.program.declarations import Weight, WeightForm
from quire.program.kv_cache import with_kv_cache_dtype
from quire.program.program import Program
from quire.program.quantize import quantize
from quire.program.tensors import DType

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 16384,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
QWEN3 = LLAMA | {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "vocab_size": 151936,
}
SHAPES: Mapping[str, Mapping[str, Any]] = {
    "Llama-3.1-8B": LLAMA,
    "Qwen3-8B": QWEN3 | {"intermediate_size": 12288, "num_hidden_layers": 36},
    "Qwen3-0.6B": QWEN3
    | {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
    # Layers of Qwen3-30B-A3B.
    "Qwen3-MoE": QWEN3
    | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 4,
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "attention_bias": False,
    },
}
TINY_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
TINY = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "vocab_size": 128,
    "max_position_embeddings": 128,
}
LAYERS_OF_REHEARSAL = 3  # a first, a last, and one between


def program_of(
    stage: Stage,
    name: str,
    *,
    precision: str = "none",
    kv_cache_dtype: str = "auto",
    layers: int = 0,
) -> Program:
    """Return the program of a model by name, in bf16; tiny in a dry run. layers: only so many."""
    config = dict(SHAPES[name])
    if layers:
        config["num_hidden_layers"] = min(layers, config["num_hidden_layers"])
    if stage.is_dry:
        config |= TINY | (TINY_EXPERTS if "num_experts" in config else {})
    if stage.is_rehearsal:
        config["num_hidden_layers"] = LAYERS_OF_REHEARSAL
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config), encoding="utf-8")
        spec = open_model(Path(folder))
        program = build_program(spec, dtype=DType.BF16, max_positions=spec.max_positions)
    return with_kv_cache_dtype(quantize(program, precision), kv_cache_dtype)


def generator_of(device: torch.device) -> torch.Generator | None:
    """Return a seeded generator; None for an absent device."""
    return None if device == absent.DEVICE else torch.Generator(device=device).manual_seed(1)


def random_weights(program: Program, device: torch.device) -> Loaded:
    """Return random weights in the shapes of a program."""
    generator = generator_of(device)
    plain: dict[str, torch.Tensor] = {}
    few: dict[str, Any] = {}
    for name, weight in program.weights.items():
        if weight.ints is not None:
            few[name] = _random_ints(weight, device, generator)
            continue
        shape = (weight.rows, weight.columns) if weight.columns else (weight.rows,)
        is_vector = weight.form is WeightForm.VECTOR
        dtype = torch.float32 if is_vector else TORCH_TYPES[weight.dtype]
        values = torch.empty(shape, dtype=dtype, device=device)
        if is_vector:
            values.fill_(1.0)
        else:
            values.normal_(0.0, 0.5 * weight.columns**-0.5, generator=generator)
        if weight.quantized is None:
            plain[name] = values
        else:  # as loading converts the checkpoint's numbers
            few[name] = Fp8Weight.of(values, weight.quantized)
    return Loaded(plain, few)


def _random_ints(weight: Weight, device: torch.device, generator: torch.Generator | None) -> Any:
    """Return integer weights in kernel layout, created in place: quantizing would take minutes."""
    from quire.execute.gpu.kernels.grouped_ints import StackedBytes, StackedInt4
    from quire.execute.gpu.kernels.int4_layout import BLOCK, PANEL, Int4Weight
    from quire.execute.gpu.kernels.linear_bytes import ByteWeight

    scheme, rows, columns = weight.ints, weight.rows, weight.columns
    assert scheme is not None, "only for integer schemes"
    small = 0.5 * columns**-0.5
    if scheme.bits == 8:
        width = -(-columns // 128) * 128
        drawn = torch.randint(
            -127, 128, (rows, width), dtype=torch.int8, device=device, generator=generator
        )
        drawn[:, columns:] = 0
        scales = torch.full((rows,), small / 73, dtype=torch.float32, device=device)
        if weight.experts:
            by_expert = drawn.view(weight.experts, -1, width)
            return StackedBytes(by_expert, scales.view(weight.experts, -1))
        return ByteWeight(drawn, scales)
    many = (weight.experts,) if weight.experts else ()
    outputs = weight.expert_rows if weight.experts else rows
    shape = (*many, -(-outputs // PANEL), -(-columns // BLOCK), 64, 64)
    packed = torch.randint(0, 256, shape, dtype=torch.uint8, device=device, generator=generator)
    groups = scheme.num_groups(columns)
    by_group = (*many, groups, outputs)
    scales = torch.full(by_group, small / 4.6, dtype=torch.bfloat16, device=device)
    zeros = None
    if scheme.has_zero_points:
        zeros = torch.full(by_group, 8, dtype=torch.uint8, device=device)
    made = StackedInt4 if weight.experts else Int4Weight
    return made(packed, scales, zeros, scheme.group, columns)


def executor_of(
    stage: Stage,
    program: Program,
    *,
    exact: bool,
    max_tokens: int,
    max_sequences: int,
    blocks: int,
    weights: Loaded | None = None,
) -> TorchExecutor:
    """Return an executor with its cache; in a dry run the kernels run in the interpreter."""
    executor = TorchExecutor(
        program,
        weights or random_weights(program, stage.device),
        device=stage.device,
        exact=exact,
        limits=StepLimits(
            max_tokens=max_tokens, max_samples=max_sequences, max_sequences=max_sequences
        ),
        launch=LaunchOptions(
            kernels=True,
            capture=absent.captured if stage.is_rehearsal else capture_of(stage.device),
            stream=stage.stream,
        ),
    )
    executor.allocate_cache(blocks, 16)
    return executor
