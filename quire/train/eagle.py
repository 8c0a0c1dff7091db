"""Train an EAGLE-3 head for a model on text that it writes itself.

    python -m quire.train.eagle --model MODEL --prompts FILE --out head
    quire serve MODEL --speculate eagle --draft-model head

The head learns the distribution of the model's next token from the model's hidden states, and, in
further rounds over the same text, from hidden states of its own in their place, as it computes
drafts. The model itself does not change. Interrupted, the same command continues from the last
checkpoint.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from quire.base.errors import SettingError
from quire.execute.quantized_weights import read_f32
from quire.models.eagle import (
    D2T,
    EMBEDDING,
    FUSE,
    NUM_TAPS,
    SOURCES,
    T2D,
    TAP_KEY,
    usual_taps,
)
from quire.models.registry import open_model
from quire.models.spec import ModelSpec
from quire.program.forms import IdSource
from quire.program.ops import Embed
from quire.train.command import Task, model_of, parser, positive, prepared, write_head
from quire.train.exit_code import exit_code
from quire.train.loop import train
from quire.train.teacher import Lesson, Teacher
from quire.train.tensor_file import as_stored
from quire.train.texts import Text
from quire.weights.binding import bind

# How much less a round's loss weighs than that of the round before it.
DISCOUNT = 0.8
EPS, THETA = 1e-5, 10_000.0
# From so many on, the usual hidden states are of three different layers.
MIN_USUAL_LAYERS = 7


class RmsNorm(nn.Module):  # type: ignore[misc]  # PyTorch may be missing
    """x / rms(x) * weight."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [T, W] from [T, W]."""
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * self.weight


class Midlayer(nn.Module):  # type: ignore[misc]
    """The decoder layer over [embedding, hidden state]; its names are those of the checkpoint."""

    def __init__(self, width: int, heads: int, kv_heads: int, head_dim: int, inner: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.input_layernorm, self.hidden_norm = RmsNorm(width), RmsNorm(width)
        self.post_attention_layernorm = RmsNorm(width)
        self.self_attn = nn.ModuleDict(
            {
                "q_proj": nn.Linear(2 * width, heads * head_dim, bias=False),
                "k_proj": nn.Linear(2 * width, kv_heads * head_dim, bias=False),
                "v_proj": nn.Linear(2 * width, kv_heads * head_dim, bias=False),
                "o_proj": nn.Linear(heads * head_dim, width, bias=False),
            }
        )
        self.mlp = nn.ModuleDict(
            {
                "gate_proj": nn.Linear(width, inner, bias=False),
                "up_proj": nn.Linear(width, inner, bias=False),
                "down_proj": nn.Linear(inner, width, bias=False),
            }
        )

    def qkv(self, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return rotated queries and keys, and values, each [heads, T, D]."""
        parts = []
        for name, heads in (("q", self.heads), ("k", self.kv_heads), ("v", self.kv_heads)):
            part = self.self_attn[f"{name}_proj"](x).view(len(x), heads, self.head_dim)
            part = part.transpose(0, 1)
            if name != "v":
                part = _rotated(part, positions)
            if name != "q":
                part = part.repeat_interleave(self.heads // self.kv_heads, 0)
            parts.append(part)
        return tuple(parts)

    def rest(self, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """Return the stream after the layer, from what attention gave [heads, T, D]."""
        joined = attended.transpose(0, 1).reshape(len(x), -1)
        x = x + self.self_attn["o_proj"](joined)
        h = self.post_attention_layernorm(x)
        gated = functional.silu(self.mlp["gate_proj"](h)) * self.mlp["up_proj"](h)
        result: torch.Tensor = x + self.mlp["down_proj"](gated)
        return result


class EagleHead(nn.Module):  # type: ignore[misc]
    """What a checkpoint holds. embedding: the model's [V, W], which is not trained; token_ids: of
    the logits; rounds: how many drafts in a row are trained."""

    def __init__(
        self,
        embedding: torch.Tensor,
        token_ids: torch.Tensor,
        *,
        target_width: int,
        shape: Mapping[str, int],
        rounds: int,
    ) -> None:
        super().__init__()
        width = embedding.shape[1]
        self.own: Mapping[str, Any] = {**shape, "rounds": rounds, "vocabulary": len(token_ids)}
        self.fc = nn.Linear(NUM_TAPS * target_width, width, bias=False)
        self.midlayer = Midlayer(width, **shape)
        self.norm = RmsNorm(width)
        self.lm_head = nn.Linear(width, len(token_ids), bias=False)
        self.rounds = rounds
        self.register_buffer("embedding", embedding, persistent=False)
        # A checkpoint has them: further texts would choose others, and its rows are of these.
        self.register_buffer("token_ids", token_ids)

    def loss(self, text: Text, lesson: Lesson) -> tuple[torch.Tensor, dict[str, float]]:
        """Return the discounted sum of the rounds' losses, and how often each guesses the model's
        likeliest token.

        Row p has the hidden states at p and the token at p + 1, and guesses the token at p + 2. In
        round n the rows from n on have the stream of the row before them, of the round before, as
        a draft has it: n rows of guesses after rows of the model's hidden states.
        """
        num_rows = len(text.ids) - 1
        hidden = self.fc(torch.from_numpy(lesson.taps[:num_rows]))
        ids = torch.tensor(text.ids[1:])
        embedded = self.midlayer.input_layernorm(self.embedding[ids])
        wanted = torch.from_numpy(lesson.logits[1:])
        positions = torch.arange(num_rows)
        soft = wanted.softmax(-1)[:, self.token_ids]
        best = wanted.argmax(-1)
        begin = max(text.num_prompt_tokens - 2, 0)
        total, agrees = torch.zeros(()), {}
        keys: list[torch.Tensor] = []
        values: list[torch.Tensor] = []
        for number in range(self.rounds):
            x = hidden
            both = torch.cat((embedded, self.midlayer.hidden_norm(x)), -1)
            q, k, v = self.midlayer.qkv(both, positions)
            keys.append(k)
            values.append(v)
            stream = self.midlayer.rest(x, _attend(q, keys, values))
            logits = self.lm_head(self.norm(stream))
            first = begin + number
            if first >= num_rows:
                break
            log_probs = logits[first:].log_softmax(-1)
            total = total - DISCOUNT**number * (soft[first:] * log_probs).sum(-1).mean()
            guessed = self.token_ids[logits.detach()[first:].argmax(-1)]
            agrees[f"agrees_{number}"] = float((guessed == best[first:]).float().mean())
            hidden = torch.cat((hidden[:1], stream[:-1]))
        return total, agrees

    def tensors(self, dtype: str, vocab_size: int) -> dict[str, Any]:
        """Return what a checkpoint holds, by its published names; servers take the embedding from
        the model."""
        tensors: dict[str, Any] = {
            name: as_stored(value.detach().numpy().astype(np.float32), dtype)
            for name, value in self.named_parameters()
        }
        assert set(tensors) == {*SOURCES, FUSE} - {EMBEDDING}, "a name is not the published one"
        ids = self.token_ids.numpy()
        if len(ids) < vocab_size:
            known = np.zeros(vocab_size, np.bool_)
            known[ids] = True
            tensors |= {D2T: (ids - np.arange(len(ids))).astype(np.int64), T2D: known}
        return tensors


def _rotated(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rotate [heads, T, D]: column i turns with column i + D / 2."""
    half = x.shape[-1] // 2
    angles = positions[:, None] * THETA ** (-torch.arange(half) / half)
    cos, sin = angles.cos(), angles.sin()
    one, two = x[..., :half], x[..., half:]
    return torch.cat((one * cos - two * sin, two * cos + one * sin), -1)


def _attend(
    q: torch.Tensor, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor]
) -> torch.Tensor:
    """Attend in round n: to the first round's rows up to n before the own one, and to one row of
    each later round, those that led to the own one."""
    last, num_rows = len(keys) - 1, q.shape[1]
    scale = 1.0 / math.sqrt(q.shape[-1])
    scores = q @ keys[0].transpose(1, 2) * scale
    is_seen = torch.arange(num_rows)[:, None] - last >= torch.arange(num_rows)[None]
    scores = scores.masked_fill(~is_seen, -math.inf)
    columns, rows = [scores], []
    for number in range(1, last + 1):
        back = last - number
        key = keys[number].roll(back, 1)
        column = (q * key).sum(-1, keepdim=True) * scale
        if back:
            # Rows that begin later than the text does have none.
            column = column.masked_fill((torch.arange(num_rows) < back)[:, None], -math.inf)
        columns.append(column)
        rows.append(values[number].roll(back, 1))
    shares = torch.cat(columns, -1)
    if last:
        # The first rows see nothing in later rounds; their results are not used.
        shares = shares.masked_fill((torch.arange(num_rows) < last)[:, None], 0.0)
    shares = shares.softmax(-1)
    attended: torch.Tensor = shares[..., :num_rows] @ values[0]
    for number, row in enumerate(rows):
        at = num_rows + number
        attended = attended + shares[..., at : at + 1] * row
    return attended


def embedding_of(teacher: Teacher) -> torch.Tensor:
    """Return the model's token embeddings [V, W]."""
    for op in teacher.program.segments["trunk"]:
        if isinstance(op, Embed) and op.ids is IdSource.TOKENS:
            weight = teacher.program.weights[op.weight]
            return torch.from_numpy(read_f32(weight, bind(teacher.program, teacher.checkpoint)))
    raise SettingError(f"{teacher.program.name}: the model looks up no token embeddings")


def frequent_ids(texts: Sequence[Text], num_ids: int, vocab_size: int) -> list[int]:
    """Return the ids that answers have most often, at most num_ids, ascending."""
    counts = Counter(id_ for text in texts for id_ in text.ids[text.num_prompt_tokens :])
    ranked = sorted(range(vocab_size), key=lambda id_: (-counts[id_], id_))
    return sorted(ranked[:num_ids])


def taps_of(given: Sequence[int] | None, folder: Path) -> tuple[int, ...]:
    """Return the layers after which hidden states are read. Raises SettingError or ModelError."""
    num_layers = open_model(folder).num_layers
    if given is None:
        if num_layers >= MIN_USUAL_LAYERS:
            return usual_taps(num_layers)
        given = (1, num_layers // 2 + 1, num_layers)
    taps = tuple(one - 1 for one in given)
    if len(set(taps)) != NUM_TAPS or not all(0 <= one < num_layers for one in taps):
        raise SettingError(
            f"--taps {' '.join(map(str, given))}: three different numbers from 1 to {num_layers} "
            "are allowed; layer i is read before it is computed"
        )
    return taps


def _arguments(arguments: list[str] | None) -> Any:
    made = parser(__doc__ or "")
    made.add_argument("--taps", type=int, nargs=NUM_TAPS, help="layers read before they run")
    made.add_argument(
        "--rounds",
        type=int,
        choices=range(1, 9),
        default=4,
        metavar="1-8",
        help="drafts in a row that it is trained for",
    )
    made.add_argument("--draft-vocab-size", type=positive, help="default: at most 32000")
    made.add_argument("--intermediate-size", type=positive, help="default: the model's")
    made.add_argument("--num-heads", type=positive, help="default: the model's")
    made.add_argument("--num-kv-heads", type=positive, help="default: the model's")
    return made.parse_args(arguments)


def _shape(args: Any, spec: ModelSpec) -> dict[str, int]:
    """Return the layer's sizes. Raises SettingError."""
    heads = args.num_heads or spec.attention.num_heads
    kv_heads = args.num_kv_heads or min(spec.attention.num_kv_heads, heads)
    if heads % kv_heads:
        raise SettingError(f"--num-heads {heads} is no multiple of {kv_heads} KV heads")
    return {
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": spec.attention.head_dim,
        "inner": args.intermediate_size or spec.mlp.size,
    }


def _config(
    head: EagleHead, task: Task, teacher: Teacher, taps: Sequence[int], shape: Mapping[str, int]
) -> dict[str, Any]:
    """Return the head's config.json."""
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": head.embedding.shape[1],
        "target_hidden_size": teacher.program.outputs["hidden"].width,
        "intermediate_size": shape["inner"],
        "num_hidden_layers": 1,
        "num_attention_heads": shape["heads"],
        "num_key_value_heads": shape["kv_heads"],
        "head_dim": shape["head_dim"],
        "hidden_act": "silu",
        "rms_norm_eps": EPS,
        "rope_theta": THETA,
        "max_position_embeddings": teacher.spec.max_positions,
        "vocab_size": teacher.program.vocab_size,
        "draft_vocab_size": len(head.token_ids),
        "torch_dtype": {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}[task.dtype],
        # Read before these layers by vLLM, and after those by SGLang.
        TAP_KEY: [one + 1 for one in taps],
        "eagle_config": {"use_aux_hidden_state": True, TAP_KEY: list(taps)},
    }


def main(arguments: list[str] | None = None) -> int:
    """Train, and write the head; returns the exit code."""
    args = _arguments(arguments)
    return exit_code(lambda: _train(args), args.out)


def _train(args: Any) -> None:
    model = model_of(args)  # what does not fit it is refused before texts are generated
    taps, shape = taps_of(args.taps, model), _shape(args, open_model(model))
    task = prepared(args)
    teacher = Teacher(
        task.model,
        max_tokens=task.max_tokens,
        num_threads=task.num_threads,
        layers=taps,
        precision=task.precision,
    )
    vocab_size = teacher.program.vocab_size
    num_ids = min(args.draft_vocab_size or 32_000, vocab_size)
    head = EagleHead(
        embedding_of(teacher),
        torch.tensor(frequent_ids(task.texts, num_ids, vocab_size)),
        target_width=teacher.program.outputs["hidden"].width,
        shape=shape,
        rounds=args.rounds,
    )
    train(head, teacher, task.texts, task.loop, task.out, task.progress)
    config = _config(head, task, teacher, taps, shape)
    write_head(task, head.tensors(task.dtype, vocab_size), config)
    teacher.close()


if __name__ == "__main__":
    sys.exit(main())
