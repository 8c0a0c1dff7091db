"""The Llama of the built-in models, in PyTorch, and its files in the Hugging Face layout.

The names of the weights are those of Hugging Face's Llama, so any checkpoint of that family with a
tied head can be read and is written alike.

Shapes below: B rows, T tokens, C hidden, H heads, G KV heads, D head dimension, V vocabulary.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import corpus
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional as F

# tool_talk.py writes the same text; a test compares both.
CHAT_TEMPLATE = (
    "{{- bos_token }}"
    "{%- set first = messages[0] if tools and messages[0]['role'] == 'system' else none %}"
    "{%- if tools %}"
    "{{- '<|system|>' + ((first['content'] | trim + '\\n') if first else '') + 'Tools:' }}"
    "{%- for tool in tools %}"
    "{%- set function = tool['function'] %}"
    "{%- set about = (function['description'] or '') | trim %}"
    "{%- set names = ((function['parameters'] or {})['properties'] or {}) | join(', ') %}"
    "{{- '\\n' + function['name'] + '(' + names + ')' + ((': ' + about) if about else '') }}"
    "{%- endfor %}"
    "{{- '<|end|>' }}"
    "{%- endif %}"
    "{%- for message in messages[(1 if first else 0):] %}"
    "{%- set content = (message['content'] or '') | trim %}"
    "{%- if message['role'] == 'tool' %}"
    "{{- '<|system|>Result: ' + content + '<|end|>' }}"
    "{%- elif message['role'] in ['system', 'user', 'assistant'] %}"
    "{{- '<|' + message['role'] + '|>' + content }}"
    "{%- for call in message['tool_calls'] or [] %}"
    "{{- '\\n' if content or not loop.first else '' }}"
    "{%- set arguments = call['function']['arguments'] %}"
    "{{- '<tool_call>\\n{\"name\": \"' + call['function']['name'] + '\", \"arguments\": ' }}"
    "{{- (arguments if arguments is string else arguments | tojson) + '}\\n</tool_call>' }}"
    "{%- endfor %}"
    "{{- '<|end|>' }}"
    "{%- else %}"
    "{{- raise_exception('role is ' + message['role']"
    " + '; allowed: system, user, assistant, tool') }}"
    "{%- endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"
)
DEFAULTS = {"do_sample": True, "temperature": 0.5, "top_p": 0.9}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The sizes of a model."""

    vocab_size: int = 2048
    hidden: int
    ffn: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int = 64
    context_tokens: int = 512
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5


BOX = Shape(hidden=256, ffn=512, num_layers=5, num_heads=4, num_kv_heads=2)
DRAFT = Shape(hidden=128, ffn=384, num_layers=2, num_heads=2, num_kv_heads=1)


class Attention(nn.Module):
    """Causal attention with rotary positions and grouped KV heads."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        q, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden, q, bias=False)
        self.k_proj = nn.Linear(shape.hidden, kv, bias=False)
        self.v_proj = nn.Linear(shape.hidden, kv, bias=False)
        self.o_proj = nn.Linear(q, shape.hidden, bias=False)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        heads = (*x.shape[:2], -1, self.head_dim)
        q = rotate(self.q_proj(x).view(heads).transpose(1, 2), rope)  # [B, H, T, D]
        k = rotate(self.k_proj(x).view(heads).transpose(1, 2), rope)  # [B, G, T, D]
        v = self.v_proj(x).view(heads).transpose(1, 2)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        mixed: Tensor = self.o_proj(out.transpose(1, 2).flatten(2))
        return mixed


class FeedForward(nn.Module):
    """The gated feed-forward part."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.ffn, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.ffn, bias=False)
        self.down_proj = nn.Linear(shape.ffn, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    """One decoder layer."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.hidden, eps=shape.norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden, eps=shape.norm_eps)
        self.mlp = FeedForward(shape)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rope)
        fed: Tensor = self.mlp(self.post_attention_layernorm(x))
        return x + fed


class Decoder(nn.Module):
    """Embedding, layers and the last norm."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_layers))
        self.norm = nn.RMSNorm(shape.hidden, eps=shape.norm_eps)


class Llama(nn.Module):
    """The language model; its head is tied to its embedding."""

    cosines: Tensor
    sines: Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.model = Decoder(shape)
        cosines, sines = rope_table(shape)
        self.register_buffer("cosines", cosines, persistent=False)
        self.register_buffer("sines", sines, persistent=False)
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                into_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
                scale = 0.02 / math.sqrt(2 * shape.num_layers) if into_residual else 0.02
                nn.init.normal_(weight, std=scale)

    def forward(self, ids: Tensor) -> Tensor:
        """Return logits [B, T, V] for the token after each of `ids` [B, T]."""
        rope = (self.cosines[: ids.shape[1]], self.sines[: ids.shape[1]])
        x = self.model.embed_tokens(ids)  # [B, T, C]
        for layer in self.model.layers:
            x = layer(x, rope)
        return F.linear(self.model.norm(x), self.model.embed_tokens.weight)


def rope_table(shape: Shape) -> tuple[Tensor, Tensor]:
    """Return cosines and sines [T, D] of the rotary embedding, for both halves of a head."""
    steps = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
    angles = torch.outer(torch.arange(shape.context_tokens), shape.rope_theta**-steps)
    angles = torch.cat([angles, angles], dim=1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate each head of x [B, H, T, D] by its position."""
    low, high = x.chunk(2, dim=-1)
    return (x * rope[0] + torch.cat([-high, low], dim=-1) * rope[1]).to(x.dtype)


def as_saved(model: Llama) -> Llama:
    """Return the model as saved: every weight rounded to bfloat16."""
    rounded = copy.deepcopy(model).eval()
    for weight in rounded.parameters():
        weight.data = weight.data.bfloat16().float()
    return rounded


@torch.no_grad()
def sum_of_losses(model: Llama, ids: list[int]) -> float:
    """Return the loss in nats, summed over every id of a text except the first."""
    device = next(model.parameters()).device
    row = torch.tensor([ids], device=device)
    scores = model(row[:, :-1]).float().flatten(0, 1)
    return float(F.cross_entropy(scores, row[:, 1:].flatten(), reduction="sum"))


def load_model(folder: Path) -> Llama:
    """Read a Llama with a tied head from a directory in the Hugging Face layout, in float32."""
    config = json.loads((folder / "config.json").read_text())
    shape = Shape(
        vocab_size=config["vocab_size"],
        hidden=config["hidden_size"],
        ffn=config["intermediate_size"],
        num_layers=config["num_hidden_layers"],
        num_heads=config["num_attention_heads"],
        num_kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        context_tokens=config["max_position_embeddings"],
        rope_theta=config["rope_theta"],
        norm_eps=config["rms_norm_eps"],
    )
    model = Llama(shape)
    weights = load_file(folder / "model.safetensors")
    model.load_state_dict({k: w.float() for k, w in weights.items() if k != "lm_head.weight"})
    return model.eval()


def write_model(out: Path, model: Llama, tokenizer: Tokenizer, shape: Shape) -> None:
    """Write weights, configuration and tokenizer; the weights are replaced atomically."""
    out.mkdir(parents=True, exist_ok=True)
    weights = {n: w.detach().cpu().bfloat16().contiguous() for n, w in model.named_parameters()}
    save_file(weights, out / "model.safetensors.part", metadata={"format": "pt"})
    (out / "model.safetensors.part").replace(out / "model.safetensors")
    ends = {
        "bos_token_id": corpus.token_id(tokenizer, corpus.BEGIN),
        "eos_token_id": corpus.token_id(tokenizer, corpus.END),
    }
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.ffn,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": shape.context_tokens,
        "rms_norm_eps": shape.norm_eps,
        "rope_theta": shape.rope_theta,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        **ends,
    }
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": corpus.BEGIN,
        "eos_token": corpus.END,
        "model_max_length": shape.context_tokens,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    _write_json(out / "config.json", config)
    _write_json(out / "tokenizer_config.json", tokenizer_config)
    _write_json(out / "generation_config.json", {**ends, **DEFAULTS})
    tokenizer.save(str(out / "tokenizer.json"))
    for path in out.iterdir():
        path.chmod(0o644)


def _write_json(path: Path, value: Mapping[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
