"""Write tiny random checkpoints with odd shapes, and all files a server needs beside the weights.

    path = write_tiny_llama(tmp_path, seed=3, dtype="bf16", num_key_value_heads=5)
    path = write_tiny(tmp_path, {"architectures": ["GPT2LMHeadModel"], ...}, seed=3)

Keyword arguments are config.json keys; None drops a key. The default shape is odd on purpose:
hidden 60, 5 heads of 16 (not 12) over 1 KV head, inner width 97, vocabulary 307, tied False.
The directory gets config.json, generation_config.json, model.safetensors (or shards and an index),
and, if the vocabulary has at least 261 ids, a byte-level tokenizer.json and a
tokenizer_config.json with a chat template. The same arguments always give the same bytes.
"""

from __future__ import annotations

import json
import math
import shutil
import zlib
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.models.registry import build_program, open_model
from quire.program.declarations import Weight, WeightForm, WeightPart
from quire.program.tensors import DType
from tests.safetensors_writer import write_safetensors

BOS_ID, EOS_ID = 0, 1
MAX_DRAWN = 1 << 20  # values per tensor; a larger one repeats them
MAX_KEPT_BYTES = 1 << 20  # of a checkpoint that is kept to be written again
_FILES: dict[str, dict[str, bytes]] = {}
SPECIAL_TOKENS = ("<|begin|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>")
MERGES = (
    "Ġ t", "h e", "Ġ a", "i n", "r e", "o n", "Ġt he", "e r", "Ġ s", "a t", "Ġ w", "n d", "o r",
    "e s", "e n", "a n", "i s", "Ġ b", "e d", "in g", "Ġ f", "Ġ p", "Ġa nd", "i t", "o u", "a r",
    "Ġ c", "Ġt o", "o f", "l e", "Ġ in", "Ġ m", "Ġ d", "Ġ h", "a s", "l l", "i c", "r o", "Ġ l",
    "Ġ n", "Ġ of", "i on", "v e", "o m", "u t", "s t",
)  # fmt: skip
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message['role'] }}|>"
    "{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def tiny_config(**changes: Any) -> dict[str, Any]:
    """Return the config.json of a tiny Llama; changes override keys, None drops one."""
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 60,
        "intermediate_size": 97,
        "num_hidden_layers": 2,
        "num_attention_heads": 5,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "vocab_size": 307,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "use_cache": True,
        "transformers_version": "4.46.0",
    }
    config.update(changes)
    return {key: value for key, value in config.items() if value is not None}


def tiny_tensors(config: Mapping[str, Any], seed: int) -> dict[str, NDArray[np.float32]]:
    """Draw tensors of a LlamaForCausalLM with `config`, by name, scaled so that logits differ."""
    rng = np.random.default_rng(seed)
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    queries, keys = heads * head_dim, config.get("num_key_value_heads", heads) * head_dim

    def draw(*shape: int, scale: float, centre: float = 0.0) -> NDArray[np.float32]:
        drawn = centre + scale * rng.standard_normal(min(math.prod(shape), MAX_DRAWN))
        return np.resize(drawn.astype(np.float32), shape)

    tensors = {"model.embed_tokens.weight": draw(config["vocab_size"], hidden, scale=1.0)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        products = (
            ("self_attn.q_proj", queries, hidden, config.get("attention_bias")),
            ("self_attn.k_proj", keys, hidden, config.get("attention_bias")),
            ("self_attn.v_proj", keys, hidden, config.get("attention_bias")),
            ("self_attn.o_proj", hidden, queries, config.get("attention_bias")),
            ("mlp.gate_proj", inner, hidden, config.get("mlp_bias")),
            ("mlp.up_proj", inner, hidden, config.get("mlp_bias")),
            ("mlp.down_proj", hidden, inner, config.get("mlp_bias")),
        )
        for name, rows, columns, biased in products:
            tensors[f"{prefix}{name}.weight"] = draw(rows, columns, scale=1.2 / columns**0.5)
            if biased:
                tensors[f"{prefix}{name}.bias"] = draw(rows, scale=0.2)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}{name}.weight"] = draw(hidden, scale=0.1, centre=1.0)
    tensors["model.norm.weight"] = draw(hidden, scale=0.1, centre=1.0)
    if not config.get("tie_word_embeddings"):
        tensors["lm_head.weight"] = draw(config["vocab_size"], hidden, scale=3.0 / hidden**0.5)
    return tensors


def write_tiny_llama(
    folder: Path, *, seed: int = 0, dtype: str = "f32", shards: int = 1, **changes: Any
) -> Path:
    """Write a checkpoint (see the module docstring) into `folder`, and return it."""
    config = tiny_config(**changes)
    write = partial(_write_llama, config=config, seed=seed, dtype=dtype, shards=shards)
    return _written_once(folder, json.dumps(["llama", config, seed, dtype, shards]), write)


def _write_llama(
    folder: Path, *, config: dict[str, Any], seed: int, dtype: str, shards: int
) -> None:
    names = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}
    config.setdefault("torch_dtype", names[dtype])
    _write_json(folder / "config.json", config)
    ends = {"bos_token_id": BOS_ID, "eos_token_id": config.get("eos_token_id", EOS_ID)}
    _write_json(folder / "generation_config.json", ends)
    write_weights(folder, tiny_tensors(config, seed), dtype=dtype, shards=shards)
    if config["vocab_size"] >= len(SPECIAL_TOKENS) + 256:
        write_tokenizer(folder, vocab_size=config["vocab_size"])


def write_tiny(folder: Path, config: Mapping[str, Any], *, seed: int, dtype: str = "f32") -> Path:
    """Write a checkpoint of any supported family: every tensor its program names, random.

    A tensor's values depend on `seed`, its name and its shape only. `config` is the complete
    config.json except the dtype; None drops a key.
    """
    kept = {key: value for key, value in config.items() if value is not None}
    write = partial(_write_tiny, kept=kept, seed=seed, dtype=dtype)
    return _written_once(folder, json.dumps(["tiny", kept, seed, dtype]), write)


def _write_tiny(folder: Path, *, kept: dict[str, Any], seed: int, dtype: str) -> None:
    kept["torch_dtype"] = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}[dtype]
    _write_json(folder / "config.json", kept)
    ends = {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID}
    _write_json(folder / "generation_config.json", ends)
    spec = open_model(folder)
    program = build_program(spec, dtype=DType.F32, max_positions=spec.max_positions)
    tensors = {
        part.source: _drawn(weight, part, seed)
        for weight in program.weights.values()
        for part in weight.parts
    }
    write_weights(folder, tensors, dtype=dtype)
    if spec.vocab_size >= len(SPECIAL_TOKENS) + 256:
        write_tokenizer(folder, vocab_size=spec.vocab_size)


def _written_once(folder: Path, key: str, write: Callable[[Path], None]) -> Path:
    """Write a checkpoint into `folder` and return it; small ones are drawn once in a process."""
    folder.mkdir(parents=True, exist_ok=True)
    if key not in _FILES:
        with TemporaryDirectory() as made:
            write(Path(made))
            paths = list(Path(made).iterdir())
            if sum(path.stat().st_size for path in paths) > MAX_KEPT_BYTES:
                for path in paths:
                    shutil.move(path, folder / path.name)
                return folder
            _FILES[key] = {path.name: path.read_bytes() for path in paths}
    for name, raw in _FILES[key].items():
        (folder / name).write_bytes(raw)
    return folder


def _drawn(weight: Weight, part: WeightPart, seed: int) -> NDArray[np.float32]:
    """Draw the tensor that `part` is cut from: norms about 1, small biases, products that
    keep sizes.
    """
    rng = np.random.default_rng((seed, zlib.crc32(part.source.encode())))
    rows = part.of_rows or part.rows
    if weight.form is WeightForm.VECTOR:
        is_norm = "norm" in part.source or ".ln_" in part.source
        centre = 1.0 - weight.offset if is_norm and not part.source.endswith(".bias") else 0.0
        return (centre + 0.2 * rng.standard_normal(rows)).astype(np.float32)
    is_embedding = weight.form is WeightForm.TABLE or part.name == "embed"
    scale = 1.0 if is_embedding else (3.0 if part.name == "head" else 1.2) / weight.columns**0.5
    tensor = (scale * rng.standard_normal((rows, weight.columns))).astype(np.float32)
    return np.ascontiguousarray(tensor.T) if part.transposed else tensor


def write_weights(
    folder: Path, tensors: Mapping[str, NDArray[np.float32]], *, dtype: str, shards: int = 1
) -> None:
    """Write model.safetensors, or `shards` files assigned round robin and their index."""
    if shards == 1:
        write_safetensors(folder / "model.safetensors", tensors, dtype=dtype)
        return
    names = list(tensors)
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        held = {name: tensors[name] for name in names[shard::shards]}
        weight_map |= dict.fromkeys(held, file)
        write_safetensors(folder / file, held, dtype=dtype)
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    _write_json(folder / "model.safetensors.index.json", index)


def write_tokenizer(folder: Path, *, vocab_size: int) -> None:
    """Write a byte-level BPE: 5 special tokens, 256 bytes, and merges for the remaining ids."""
    letters = _byte_letters()
    vocab = {token: index for index, token in enumerate(SPECIAL_TOKENS)}
    vocab |= {letters[byte]: len(SPECIAL_TOKENS) + byte for byte in range(256)}
    merges = MERGES[: vocab_size - len(vocab)]
    for merge in merges:
        vocab[merge.replace(" ", "")] = len(vocab)
    added = [
        {"id": vocab[token], "content": token, "single_word": False, "lstrip": False,
         "rstrip": False, "normalized": False, "special": True}
        for token in SPECIAL_TOKENS
    ]  # fmt: skip
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    begin = SPECIAL_TOKENS[BOS_ID]
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": byte_level | {"use_regex": True},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [_special(begin), _sequence("A", 0)],
            "pair": [_special(begin), _sequence("A", 0), _sequence("B", 1)],
            "special_tokens": {begin: {"id": begin, "ids": [BOS_ID], "tokens": [begin]}},
        },
        "decoder": byte_level | {"use_regex": True},
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
            "ignore_merges": False, "vocab": vocab, "merges": list(merges),
        },
    }  # fmt: skip
    _write_json(folder / "tokenizer.json", tokenizer)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": begin,
        "eos_token": SPECIAL_TOKENS[EOS_ID],
        "add_bos_token": True,
        "chat_template": CHAT_TEMPLATE,
    }
    _write_json(folder / "tokenizer_config.json", settings)


def _byte_letters() -> list[str]:
    """Return the printable letter that byte-level BPE uses for each byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters, extra = [""] * 256, 0
    for byte in range(256):
        if byte in plain:
            letters[byte] = chr(byte)
        else:
            letters[byte] = chr(256 + extra)
            extra += 1
    return letters


def _special(token: str) -> dict[str, Any]:
    return {"SpecialToken": {"id": token, "type_id": 0}}


def _sequence(name: str, type_id: int) -> dict[str, Any]:
    return {"Sequence": {"id": name, "type_id": type_id}}


def _write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False), encoding="utf-8")
