"""Draft heads in the layouts of published checkpoints: keys of config.json, names and types of
tensors as they have them, in small sizes.

The layouts are those of SafeAILab's, SpecForge's, AngelSlim's and ModelOpt's EAGLE-3 heads, of the
speculators library, and of Medusa heads by FasterDecoding, ModelOpt and for vLLM.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from quire.base.errors import ConfigError, ModelError
from quire.engine.assembly.head_files import HeadFiles, read_heads
from quire.models.eagle import EMBEDDING, TAP_KEY
from quire.models.head_kind import heads_in
from quire.models.registry import build_program, open_model
from quire.program.program import Program
from quire.program.tensors import DType
from quire.train.tensor_file import as_stored, write_tensors
from quire.weights.checkpoint import Checkpoint, open_checkpoint
from tests.draft_heads import eagle_tensors, medusa_tensors
from tests.tiny_models import write_tiny_llama

HIDDEN, VOCAB, KNOWN, LAYERS = 60, 307, 90, 8
USUAL_TAPS = (1, 3, 4)  # before layers 2, n / 2 and n - 3
Tensors = dict[str, NDArray[Any]]
Target = tuple[Program, Checkpoint]

# As SafeAILab's heads have it: without rope_theta, head_dim and the layers that are read.
SAFEAI: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": HIDDEN,
    "initializer_range": 0.02,
    "intermediate_size": 24,
    "max_position_embeddings": 2048,
    "model_type": "llama",
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "num_hidden_layers": 1,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-05,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "transformers_version": "4.28.1",
    "use_cache": True,
    "vocab_size": VOCAB,
    "draft_vocab_size": KNOWN,
}
# As AngelSlim's and SpecForge's for Qwen3 have it.
QWEN3: dict[str, Any] = {
    **SAFEAI,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "head_dim": 8,
    "max_window_layers": 36,
    "mlp_bias": False,
    "pretraining_tp": 1,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "target_model_type": "qwen3",
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
}
# The layer of a head of the speculators library.
LAYER: dict[str, Any] = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "head_dim": 8,
    "hidden_act": "silu",
    "hidden_size": HIDDEN,
    "initializer_range": 0.02,
    "intermediate_size": 24,
    "max_position_embeddings": 512,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 3,
    "num_hidden_layers": 1,
    "num_key_value_heads": 1,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "use_cache": True,
    "vocab_size": VOCAB,
}
SPECULATORS: dict[str, Any] = {
    "auto_map": {"": "eagle3.Eagle3SpeculatorConfig"},
    "draft_vocab_size": KNOWN,
    "has_no_defaults_at_init": False,
    "speculators_config": {
        "algorithm": "eagle3",
        "default_proposal_method": "greedy",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 5}],
        "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": "somewhere/else"},
    },
    "speculators_model_type": "eagle3",
    "target_hidden_size": None,
    "transformers_version": "4.57.1",
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    folder = write_tiny_llama(
        tmp_path_factory.mktemp("target") / "m", seed=3, num_hidden_layers=LAYERS
    )
    spec = open_model(folder)
    program = build_program(spec, dtype=DType.F32, max_positions=spec.max_positions)
    return program, open_checkpoint(folder)


def stored(tensors: Tensors, dtype: str) -> Tensors:
    """Return floats as `dtype`; tables as they are."""
    return {
        name: as_stored(one, dtype) if one.dtype == np.float32 else one
        for name, one in tensors.items()
    }


def written(folder: Path, config: dict[str, Any], tensors: Tensors, **files: str) -> Path:
    """Write a head. files: others beside the weights."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    write_tensors(folder / "model.safetensors", tensors, {"format": "pt"})
    for name, text in files.items():
        (folder / name).write_text(text)
    return folder


def eagle(seed: int = 1, known: int = KNOWN, *, head_dim: int = 8) -> Tensors:
    """Return the tensors of a head for the target."""
    tensors = eagle_tensors(hidden_size=HIDDEN, vocab_size=VOCAB, draft_vocab_size=known, seed=seed)
    if head_dim != 8:
        rng = np.random.default_rng(seed)
        for part, heads in (("q", 3), ("k", 1), ("v", 1)):
            shape = (heads * head_dim, 2 * HIDDEN)
            tensors[f"midlayer.self_attn.{part}_proj.weight"] = rng.normal(0, 0.1, shape)
        tensors["midlayer.self_attn.o_proj.weight"] = rng.normal(0, 0.1, (HIDDEN, 3 * head_dim))
    return {
        name: one.astype(np.float32) if one.dtype == np.float64 else one
        for name, one in tensors.items()
    }


def renamed(tensors: Tensors, prefix: str) -> Tensors:
    """Return the tensors with another name of the layer."""
    return {name.replace("midlayer.", prefix): one for name, one in tensors.items()}


def read(folder: Path, target: Target) -> HeadFiles:
    """Return the heads in a directory, as an engine reads them."""
    kind = heads_in(folder)
    assert kind is not None
    return read_heads(kind, folder, *target, DType.F32)


def safeai() -> tuple[dict[str, Any], Tensors]:
    """SafeAILab, converted from the pickle."""
    return SAFEAI, stored(eagle(head_dim=20), "f16")


def safeai_narrow() -> tuple[dict[str, Any], Tensors]:
    """SafeAILab for a large model: a head narrower than it, with an embedding of its own."""
    tensors = eagle_tensors(hidden_size=40, vocab_size=VOCAB, draft_vocab_size=KNOWN)
    tensors["fc.weight"] = np.ones((40, 3 * HIDDEN), np.float32)
    tensors[EMBEDDING] = np.ones((VOCAB, 40), np.float32)
    config = {**SAFEAI, "hidden_size": 40, "target_hidden_size": HIDDEN, "head_dim": 8}
    return config, stored(tensors, "f16")


def angelslim() -> tuple[dict[str, Any], Tensors]:
    """AngelSlim, for vLLM under another architecture."""
    return {**QWEN3, "architectures": ["Eagle3LlamaForCausalLM"]}, stored(eagle(), "bf16")


def specforge() -> tuple[dict[str, Any], Tensors]:
    """SpecForge: layers after which is read, and the embedding of the model in the file."""
    tensors = eagle() | {EMBEDDING: np.ones((VOCAB, HIDDEN), np.float32)}
    return {**QWEN3, "eagle_config": {TAP_KEY: [1, 3, 5]}}, stored(tensors, "bf16")


def modelopt() -> tuple[dict[str, Any], Tensors]:
    """ModelOpt: flags in eagle_config, and an empty list of layers."""
    section = {
        TAP_KEY: [],
        "use_aux_hidden_state": True,
        "use_input_layernorm_in_first_layer": True,
        "use_last_layernorm": True,
        "use_mtp_layernorm": False,
        "next_layer_regular": True,
        "parallel_draft_step": 1,
        "parallel_draft_heads_num_layers": 0,
    }
    return {**QWEN3, "eagle_config": section}, stored(eagle(), "bf16")


def modelopt_normed() -> tuple[dict[str, Any], Tensors]:
    """ModelOpt with a norm before `fc`, which only eagle_config says."""
    config, tensors = modelopt()
    norm = as_stored(np.ones(3 * HIDDEN, np.float32), "bf16")
    section = {**config["eagle_config"], "norm_before_fc": True}
    return {**config, "eagle_config": section}, {**tensors, "input_norm.weight": norm}


def full_vocabulary() -> tuple[dict[str, Any], Tensors]:
    """A head over all tokens, with tables that change nothing."""
    return {**QWEN3, "draft_vocab_size": VOCAB}, stored(eagle(known=VOCAB), "bf16")


def tied() -> tuple[dict[str, Any], Tensors]:
    """A head over all tokens that has the model's own product onto the vocabulary."""
    tensors = eagle(known=VOCAB)
    for name in ("lm_head.weight", "d2t", "t2d"):
        del tensors[name]
    config = {key: value for key, value in QWEN3.items() if key != "draft_vocab_size"}
    return config, stored(tensors, "bf16")


def converted_speculators() -> tuple[dict[str, Any], Tensors]:
    """The speculators library, first form."""
    config = {
        **SPECULATORS,
        "architectures": ["Eagle3Speculator"],
        "norm_before_residual": False,
        "torch_dtype": "float32",
        "transformer_layer_config": {**LAYER, "rope_scaling": None, "rope_theta": 10000.0},
    }
    tensors = renamed(eagle(), "layers.0.")
    return config, tensors | {"layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32)}


def speculators() -> tuple[dict[str, Any], Tensors]:
    """The speculators library as it trains now: one norm before `fc`, and a normed stream."""
    config = {
        **SPECULATORS,
        "architectures": ["Eagle3DraftModel"],
        "dtype": "bfloat16",
        "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
        "embed_requires_grad": False,
        "fc_norm": False,
        "norm_before_fc": True,
        "norm_before_residual": True,
        "norm_output": True,
        "tie_word_embeddings": False,
        "transformer_layer_config": {
            **LAYER,
            "layer_types": ["sliding_attention"],
            "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
            "sliding_window": 128,
            "use_sliding_window": True,
        },
    }
    tensors = renamed(eagle(), "layers.0.")
    tensors["input_norm.weight"] = np.ones(3 * HIDDEN, np.float32)
    return config, stored(tensors, "bf16")


def eagle_3_1() -> tuple[dict[str, Any], Tensors]:
    """EAGLE-3.1: a norm for each hidden state, and a normed stream."""
    tensors = renamed(eagle(), "model.layers.0.")
    tensors |= {f"fc_norm.{tap}.weight": np.ones(HIDDEN, np.float32) for tap in range(3)}
    return {**QWEN3, "fc_norm": True, "norm_output": True}, stored(tensors, "bf16")


def qwen_layer() -> tuple[dict[str, Any], Tensors]:
    """A layer of Qwen's kind: norms of the heads' queries and keys."""
    tensors = eagle()
    for part in "qk":
        tensors[f"midlayer.self_attn.{part}_norm.weight"] = np.ones(8, np.float32)
    return {**QWEN3, "model_type": "qwen3"}, stored(tensors, "bf16")


def with_biases() -> tuple[dict[str, Any], Tensors]:
    """A layer with biases of attention."""
    tensors = eagle()
    sizes = {"q": 24, "k": 8, "v": 8, "o": HIDDEN}
    for part, size in sizes.items():
        tensors[f"midlayer.self_attn.{part}_proj.bias"] = np.ones(size, np.float32)
    return {**QWEN3, "attention_bias": True}, stored(tensors, "bf16")


def several_layers() -> tuple[dict[str, Any], Tensors]:
    """The speculators library with three layers, of which the first reads the hidden states."""
    config, tensors = converted_speculators()
    layer = {
        **config["transformer_layer_config"],
        "num_hidden_layers": 3,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        "sliding_window": 64,
    }
    first = {name for name in tensors if "layers.0." in name and "rotary" not in name}
    for index in (1, 2):
        for name in first - {"layers.0.hidden_norm.weight"}:
            later = tensors[name]
            if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
                later = np.ascontiguousarray(later[:, :HIDDEN])
            tensors[name.replace("layers.0.", f"layers.{index}.")] = later
    return {**config, "transformer_layer_config": layer}, tensors


EAGLES: dict[Callable[[], tuple[dict[str, Any], Tensors]], tuple[int, ...]] = {
    safeai: USUAL_TAPS,
    safeai_narrow: USUAL_TAPS,
    angelslim: USUAL_TAPS,
    specforge: (1, 3, 5),
    modelopt: USUAL_TAPS,
    modelopt_normed: USUAL_TAPS,
    full_vocabulary: USUAL_TAPS,
    tied: USUAL_TAPS,
    converted_speculators: USUAL_TAPS,
    several_layers: USUAL_TAPS,
    speculators: (1, 3, 4),
    eagle_3_1: USUAL_TAPS,
    qwen_layer: USUAL_TAPS,
    with_biases: USUAL_TAPS,
}


@pytest.mark.parametrize("layout", EAGLES, ids=lambda layout: layout.__name__)
def test_published_eagle_heads_are_read(
    layout: Callable[[], tuple[dict[str, Any], Tensors]], target: Target, tmp_path: Path
) -> None:
    config, tensors = layout()
    files = read(written(tmp_path, config, tensors, **{"training_state.pt": "a pickle"}), target)
    assert files.tapped_layers == EAGLES[layout]
    assert files.fuse is not None
    for program, checkpoint in zip(files.all_programs, files.all_checkpoints, strict=True):
        shapes = program.source_shapes()
        assert set(checkpoint.names) == set(shapes)  # all that is computed with, and no more
        assert all(checkpoint.describe(name)[1] == shape for name, shape in shapes.items())
    assert (files.vocabulary is None) == ("d2t" not in tensors)
    if files.vocabulary is not None:
        known = tensors["d2t"] + np.arange(len(tensors["d2t"]))
        np.testing.assert_array_equal(files.vocabulary, known)


def test_what_a_head_has_in_common_with_the_model_is_the_models(
    target: Target, tmp_path: Path
) -> None:
    files = read(written(tmp_path, *tied()), target)
    (checkpoint, _), (_, weights) = files.all_checkpoints, target
    for ours, theirs in (
        ("lm_head.weight", "lm_head.weight"),
        ("model.embed_tokens.weight", "model.embed_tokens.weight"),
    ):
        np.testing.assert_array_equal(checkpoint.read_f32(ours), weights.read_f32(theirs))
    assert files.vocabulary is None


def medusa(prefix: str, num_heads: int = 5) -> Tensors:
    return medusa_tensors(hidden_size=HIDDEN, vocab_size=VOCAB, num_heads=num_heads, prefix=prefix)


def for_vllm(*, shared: bool = False) -> Tensors:
    """Return two heads as those for vLLM are, without biases."""
    tensors: Tensors = {}
    for head in range(2):
        tensors[f"blocks.{head}.layers.0.weight"] = np.ones((HIDDEN, HIDDEN), np.float32)
        if not (shared and head):
            tensors[f"lm_heads.{head}.weight"] = np.ones((VOCAB, HIDDEN), np.float32)
    return tensors


FASTER_DECODING = {
    "base_model_name_or_path": "somewhere/else",
    "medusa_num_heads": 2,
    "medusa_num_layers": 1,
    "transformers_version": "4.31.0",
}
FOR_VLLM = {
    "architectures": ["MedusaModel"],
    "hidden_size": HIDDEN,
    "medusa_fc_bias": False,
    "model_type": "medusa",
    "num_heads": 2,
    "num_hidden_layers": 1,
    "truncated_vocab_size": VOCAB,
    "vocab_size": VOCAB,
}


@pytest.mark.parametrize(
    ("config", "tensors", "num_heads"),
    [
        (FASTER_DECODING, medusa(""), 5),  # its config.json counts two of them
        (FASTER_DECODING, medusa("medusa_heads.", 2), 2),
        (FOR_VLLM, for_vllm(), 2),
        ({**FOR_VLLM, "original_lm_head": True}, for_vllm(shared=True), 2),
    ],
)
def test_published_medusa_heads_are_read(
    config: dict[str, Any], tensors: Tensors, num_heads: int, target: Target, tmp_path: Path
) -> None:
    files = read(written(tmp_path, config, stored(tensors, "f16")), target)
    assert len(files.programs) == num_heads
    for program, checkpoint in zip(files.programs, files.checkpoints, strict=True):
        assert set(checkpoint.names) == set(program.source_shapes())


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"architectures": ["LlamaForCausalLMEagle"]}, None),
        ({"architectures": ["EagleSpeculator"]}, "heads of EAGLE 1 or 2 .architectures "),
        ({"model_type": "eagle"}, "heads of EAGLE 1 or 2 .model_type "),
        ({"speculators_model_type": "eagle"}, "heads of EAGLE 1 or 2 .speculators_model_type "),
        ({"speculators_model_type": "dflash", "draft_vocab_size": 9}, "heads of kind .dflash."),
        ({"speculators_model_type": "peagle", "draft_vocab_size": 9}, "heads of kind .peagle."),
        ({"dflash_config": {}, "draft_vocab_size": 9}, "several tokens in one pass .dflash_config"),
        (
            {"architectures": ["LlamaForCausalLMEagle3"], "parallel_drafting": True},
            "several tokens in one pass .parallel_drafting true in config.json",
        ),
        ({"parallel_drafting": 1, "draft_vocab_size": 9}, "in one pass .parallel_drafting 1 in"),
        ({"architectures": ["DFlashDraftModel"]}, "in one pass .architectures .DFlashDraftModel."),
        ({"architectures": ["DeepSeekMTPModel"]}, "MTP layers .multi-token prediction.*architect"),
        ({"model_type": "qwen3_next_mtp"}, "MTP layers .multi-token prediction.*model_type"),
        (
            {"architectures": ["Eagle3DeepseekV2ForCausalLM"], "kv_lora_rank": 512},
            "EAGLE-3 heads with latent attention .MLA. .kv_lora_rank",
        ),
    ],
)
def test_heads_of_other_kinds_are_refused_by_name(
    config: dict[str, Any], message: str | None, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    if message is None:  # as a model's; it is refused where its tensors are read
        assert heads_in(tmp_path) is None
        return
    with pytest.raises(ModelError, match=f"{message}.*EAGLE-3 heads .with draft_vocab_size"):
        heads_in(tmp_path)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"eagle_config": {"use_mtp_layernorm": True}}, "use_mtp_layernorm is true; false is"),
        ({"eagle_config": {"use_last_layernorm": False}}, "use_last_layernorm is false; true is"),
        ({"eagle_config": {"parallel_draft_step": 4}}, "guess several tokens in one pass"),
        ({"norm_before_fc": True, "fc_norm": True}, "norm_before_fc and fc_norm are both true"),
        ({"mlp_bias": True}, "heads with biases in the MLP"),
        ({"layer_types": ["sliding_attention"]}, "sliding_window is missing"),
        ({"head_dim": 7}, "head_dim is 7; pairs of columns are rotated"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    config: dict[str, Any], message: str, target: Target, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        read(written(tmp_path, {**QWEN3, **config}, eagle()), target)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"norm_before_fc": True}, "input_norm.weight is missing"),
        ({"fc_norm": True}, "fc_norm.0.weight is missing"),
        ({"attention_bias": True}, "midlayer.self_attn.q_proj.bias is missing"),
    ],
)
def test_tensors_that_config_json_promises_are_missed(
    config: dict[str, Any], message: str, target: Target, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=message):
        read(written(tmp_path, {**QWEN3, **config}, eagle()), target)


def test_too_few_layers_are_listed_with_the_other_problems(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path / "model", seed=3, num_hidden_layers=3)
    spec = open_model(folder)
    shallow = build_program(spec, dtype=DType.F32, max_positions=spec.max_positions)
    tensors = eagle()
    del tensors["norm.weight"]
    config = {**QWEN3, "target_hidden_size": 64}
    with pytest.raises(ModelError) as caught:
        read(written(tmp_path / "head", config, tensors), (shallow, open_checkpoint(folder)))
    for said in (
        "\n  - the model has 3 layers, too few for the usual hidden states",
        "\n  - target_hidden_size in config.json is 64; the model's is 60",
        "\n  - norm.weight is missing",
    ):
        assert said in str(caught.value)


@pytest.mark.parametrize(
    ("config", "ids"),
    [
        ({TAP_KEY: [1, 2, 9]}, "layer id 9 in .* 8 layers; ids from 1 to 8"),
        ({"eagle_config": {TAP_KEY: [0, 2, 8]}}, "layer id 8 in .* 8 layers; ids from 0 to 7"),
    ],
)
def test_layers_beyond_the_model_have_the_numbers_of_the_file(
    config: dict[str, Any], ids: str, target: Target, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=f"\n  - {ids} are allowed there\n"):
        read(written(tmp_path, {**QWEN3, **config}, eagle()), target)


BAD_WHOLE = "a whole number from 1 to 65536 is allowed"
YARN = {"rope_type": "yarn", "factor": 2}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"num_attention_heads": 0}, f"num_attention_heads is 0; {BAD_WHOLE}"),
        ({"num_attention_heads": "3"}, f'num_attention_heads is "3"; {BAD_WHOLE}'),
        ({"num_key_value_heads": 0}, f"num_key_value_heads is 0; {BAD_WHOLE}"),
        ({"num_attention_heads": 0, "head_dim": None, "hidden_size": 61}, BAD_WHOLE),
        ({"head_dim": 7, "num_attention_heads": 3}, "head_dim is 7; pairs of columns"),
        ({"fc_norm": True, "norm_before_fc": 1}, "norm_before_fc is 1; true or false is allowed"),
        ({"partial_rotary_factor": 0}, "partial_rotary_factor is 0; a number from 0.001 to 1"),
        ({"rope_scaling": {**YARN, "beta_fast": "x"}}, 'beta_fast is "x"; a number'),
        ({"rope_scaling": {**YARN, "rope_theta": "x"}}, 'rope_theta is "x"; a number'),
        ({"rope_theta": "x", "rope_scaling": {**YARN, "rope_theta": 9}}, 'rope_theta is "x"; a'),
        ({"eagle_config": [0, 1, 2]}, r"eagle_config is \[0, 1, 2\]; an object is allowed"),
        ({TAP_KEY: 0, "eagle_config": {TAP_KEY: [0, 1, 2]}}, "layer_ids is 0; 3 different numbers"),
    ],
)
def test_a_bad_field_is_the_only_problem(
    config: dict[str, Any], message: str, target: Target, tmp_path: Path
) -> None:
    base = {**QWEN3, "num_key_value_heads": 3}
    with pytest.raises(ConfigError, match=message) as caught:
        read(written(tmp_path, {**base, **config}, eagle()), target)
    assert str(caught.value).count("\n") == 1


@pytest.mark.parametrize("layer", [None, [], "llama", 5, {}])
def test_a_layer_that_is_no_object_is_named(layer: Any, target: Target, tmp_path: Path) -> None:
    config = {**SPECULATORS, "transformer_layer_config": layer}
    message = "config.json: transformer_layer_config is .*; an object with hidden_size"
    if layer == {}:
        message = "hidden_size is missing; a whole number"
    with pytest.raises(ConfigError, match=message):
        read(written(tmp_path, config, eagle()), target)
    del config["transformer_layer_config"]
    with pytest.raises(ConfigError, match="transformer_layer_config is missing; an object"):
        read(written(tmp_path, config, eagle()), target)
    assert read(written(tmp_path, {**QWEN3, "transformer_layer_config": None}, eagle()), target)


def test_a_bad_vocabulary_of_medusa_heads_is_the_only_problem(
    target: Target, tmp_path: Path
) -> None:
    config = {"model_type": "medusa", "medusa_num_heads": 5, "vocab_size": 0}
    folder = written(tmp_path, {**config, "truncated_vocab_size": VOCAB}, medusa(""))
    with pytest.raises(ConfigError, match="vocab_size is 0; a whole number") as caught:
        read(folder, target)
    assert str(caught.value).count("\n") == 1


def test_a_token_table_of_int32_is_that_of_int64(target: Target, tmp_path: Path) -> None:
    tensors = eagle()
    wide = read(written(tmp_path / "wide", QWEN3, tensors), target).vocabulary
    tensors["d2t"] = tensors["d2t"].astype(np.int32)
    narrow = read(written(tmp_path / "narrow", QWEN3, tensors), target).vocabulary
    assert wide is not None
    assert np.array_equal(wide, narrow)
