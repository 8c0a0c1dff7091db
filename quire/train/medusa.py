"""Train Medusa heads for a model on text that it writes itself.

    python -m quire.train.medusa --model MODEL --prompts FILE --out heads
    quire serve MODEL --speculate medusa --draft-model heads

Each head begins as the model's own head and learns, from the hidden state at position p, the
distribution that the model has for the token at p + 2 + its number. The model itself does not
change. Interrupted, the same command continues from the last checkpoint.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from quire.base.errors import SettingError
from quire.execute.quantized_weights import read_f32
from quire.program.ops import Linear
from quire.train.command import parser, prepared, write_head
from quire.train.exit_code import exit_code
from quire.train.loop import train
from quire.train.teacher import Lesson, Teacher
from quire.train.tensor_file import as_stored
from quire.train.texts import Text
from quire.weights.binding import bind

# How much less a head's loss weighs than that of the head before it.
DISCOUNT = 0.8


class ResBlock(nn.Module):  # type: ignore[misc]  # PyTorch may be missing
    """x + silu(W x + b); it begins as x."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [T, W] from [T, W]."""
        result: torch.Tensor = x + functional.silu(self.linear(x))
        return result


class MedusaHeads(nn.Module):  # type: ignore[misc]  # PyTorch may be missing
    """Heads over what the model's head reads. start: the model's head [V, W]."""

    def __init__(self, num_heads: int, num_layers: int, start: torch.Tensor) -> None:
        super().__init__()
        vocab_size, width = start.shape
        self.own: Mapping[str, Any] = {"heads": num_heads, "layers": num_layers, "width": width}
        self.heads = nn.ModuleList()
        for _ in range(num_heads):
            last = nn.Linear(width, vocab_size, bias=False)
            with torch.no_grad():
                last.weight.copy_(start)
            self.heads.append(nn.Sequential(*(ResBlock(width) for _ in range(num_layers)), last))

    def loss(self, text: Text, lesson: Lesson) -> tuple[torch.Tensor, dict[str, float]]:
        """Return the discounted sum of the heads' losses, and how often each guesses the model's
        likeliest token."""
        hidden = torch.from_numpy(lesson.head_input)
        wanted = torch.from_numpy(lesson.logits)
        begin, total, agrees = text.num_prompt_tokens - 1, torch.zeros(()), {}
        for number, head in enumerate(self.heads):
            later = number + 1  # the distribution of token p + 2 + number is at p + 1 + number
            if len(hidden) - later <= begin:
                break
            guessed = head(hidden[begin : len(hidden) - later])
            soft = wanted[begin + later :].softmax(-1)
            total = total + DISCOUNT**number * functional.cross_entropy(guessed, soft)
            same = guessed.detach().argmax(-1) == wanted[begin + later :].argmax(-1)
            agrees[f"agrees_{number}"] = float(same.float().mean())
        return total, agrees

    def tensors(self, dtype: str) -> dict[str, Any]:
        """Return the parameters under their published names."""
        return {
            name.replace("heads.", "medusa_lm_head.", 1): as_stored(
                value.detach().numpy().astype(np.float32), dtype
            )
            for name, value in self.named_parameters()
        }


def model_head(teacher: Teacher) -> torch.Tensor:
    """Return the weight of the product onto the vocabulary [V, W]."""
    program = teacher.program
    logits = program.outputs["logits"].buffer
    for op in program.segments["head"]:
        if isinstance(op, Linear) and op.y.buffer == logits:
            weight = program.weights[op.weight]
            return torch.from_numpy(read_f32(weight, bind(program, teacher.checkpoint)))
    raise AssertionError("a program with a head input has a product onto the vocabulary")


def check_lengths(num_heads: int, longest: int, why: str) -> None:
    """Raise SettingError for heads that guess beyond the end of each answer, and so learn nothing.

    longest: tokens of the longest answer; why: what it follows from.
    """
    if num_heads > longest:
        raise SettingError(
            f"--heads {num_heads}: the longest answer has {longest} tokens ({why}), so that heads "
            f"after the first {longest} would learn nothing; give --heads {longest}, or longer "
            "answers (--answer-tokens, --max-tokens, another --out for their texts)"
        )


def main(arguments: list[str] | None = None) -> int:
    """Train, and write the heads; returns the exit code."""
    made = parser(__doc__ or "")
    made.add_argument(
        "--heads",
        type=int,
        choices=range(1, 17),
        default=4,
        metavar="1-16",
        help="most drafts in a row",
    )
    made.add_argument(
        "--layers", type=int, choices=range(1, 5), default=1, metavar="1-4", help="of each head"
    )
    args = made.parse_args(arguments)
    return exit_code(lambda: _train(args), args.out)


def _train(args: Any) -> None:
    check_lengths(args.heads, args.answer_tokens, f"--answer-tokens {args.answer_tokens}")
    task = prepared(args)
    lengths = (min(len(text.ids), task.max_tokens) - text.num_prompt_tokens for text in task.texts)
    check_lengths(args.heads, max(lengths), f"within --max-tokens {task.max_tokens}")
    teacher = Teacher(
        task.model,
        max_tokens=task.max_tokens,
        num_threads=task.num_threads,
        precision=task.precision,
    )
    heads = MedusaHeads(args.heads, args.layers, model_head(teacher))
    train(heads, teacher, task.texts, task.loop, task.out, task.progress)
    config = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "medusa_num_heads": args.heads,
        "medusa_num_layers": args.layers,
        "hidden_size": teacher.head_width,
        "vocab_size": teacher.program.vocab_size,
        "torch_dtype": {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}[args.dtype],
    }
    write_head(task, heads.tensors(args.dtype), config)
    teacher.close()


if __name__ == "__main__":
    sys.exit(main())
