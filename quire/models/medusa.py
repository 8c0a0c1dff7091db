"""Medusa heads: each guesses one later token from the target's last hidden state.

The layout of FasterDecoding/Medusa: head i is `num_layers` residual blocks, x + silu(W x + b), and
a product onto the vocabulary; it reads the hidden state at a position and guesses the token i + 2
positions later. A head is a Program of its own, so that only as many are computed as are asked for.
Knows no file but config.json and no executor.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from quire.base.errors import ModelError
from quire.base.show import show
from quire.models.config_reader import ConfigReader
from quire.models.decoder_config import read_dtype
from quire.program.builder import ProgramBuilder
from quire.program.declarations import WeightPart
from quire.program.forms import ActivationForm
from quire.program.program import Program
from quire.program.tensors import DType

MAX_HEADS = 64
# What published files have before "HEAD.LAYER.linear.weight".
_NAME = re.compile(
    r"(?:medusa_lm_head\.|medusa_heads?\.)?([0-9]{1,4})\.([0-9]{1,4})\.(linear\.)?(weight|bias)"
)
# And what those for vLLM have.
_BLOCK = re.compile(r"(?:medusa_heads\.)?blocks\.([0-9]{1,4})\.layers\.([0-9]{1,4})\.(weight|bias)")
_HEAD = re.compile(r"(?:medusa_heads\.)?lm_heads\.([0-9]{1,4})\.weight")
# The only product onto the vocabulary where all heads have it together (original_lm_head).
_SHARED_HEAD = re.compile(r"(?:medusa_heads\.)?(?:lm_heads\.0|lm_head)\.weight")


@dataclass(frozen=True, slots=True, kw_only=True)
class MedusaSpec:
    """num_heads heads of num_layers residual blocks each. hidden_size and vocab_size: what
    config.json says of them, 0 where it does not. has_bias: of the blocks. shares_head: all heads
    have one product onto the vocabulary."""

    num_heads: int
    num_layers: int
    hidden_size: int
    vocab_size: int
    dtype: str
    has_bias: bool = True
    shares_head: bool = False


def read_medusa(config: ConfigReader) -> MedusaSpec:
    """Return the heads' configuration; keys that say nothing of them are passed over.

    Raises ConfigError with every problem of the file.
    """
    is_named = config.has("medusa_num_heads")
    heads, layers = ("medusa_num_heads", "medusa_num_layers")
    if not is_named:
        heads, layers = "num_heads", "num_hidden_layers"
    num_heads = config.whole(heads, 1, MAX_HEADS)
    num_layers = config.whole(layers, 1, 64, default=1)
    spec = MedusaSpec(
        num_heads=num_heads,
        num_layers=num_layers,
        hidden_size=config.whole("hidden_size", 1, 2**20, default=0),
        vocab_size=config.whole("vocab_size", 1, 2**24, default=0),
        dtype=read_dtype(config),
        shares_head=config.flag("original_lm_head", default=False),
    )
    truncated = config.take("truncated_vocab_size")
    if truncated is not None and truncated != spec.vocab_size:
        config.note(
            f"truncated_vocab_size is {show(truncated)}: heads over a part of the vocabulary are "
            "not supported; train them with `python -m quire.train.medusa`, or take EAGLE-3",
            of=("vocab_size",),
        )
    config.pass_over_all()
    config.finish()
    return spec


def build_medusa_head(
    spec: MedusaSpec, *, hidden_size: int, vocab_size: int, dtype: DType
) -> Program:
    """Return the program of one head; its tensors are named without the head's number."""
    p = ProgramBuilder("MedusaHead", dtype=dtype)
    x = p.feed(hidden_size)  # [T, H]
    for layer in range(spec.num_layers):
        source = f"{layer}.linear"
        weight = p.matrix(
            f"block.{layer}", [WeightPart("linear", f"{source}.weight", hidden_size)], hidden_size
        )
        bias = None
        if spec.has_bias:
            part = WeightPart("linear", f"{source}.bias", hidden_size)
            bias = p.vector(f"block.{layer}.bias", [part])
        added = p.activation(p.linear(p.rounded(x), weight, bias=bias), form=ActivationForm.SILU)
        p.add(x, added)
    x = p.begin_head(x)  # [S, H]
    part = WeightPart("head", f"{spec.num_layers}.weight", vocab_size)
    head = p.matrix("head", [part], hidden_size)
    p.output("logits", p.linear(p.rounded(x), head, dtype=DType.F32, out_name="logits"))
    return p.build(vocab_size=vocab_size, max_positions=1)


def has_biases(names: Iterable[str]) -> bool:
    """Return whether the blocks of heads with such tensors have biases: those for vLLM may have
    none."""
    blocks = [match for name in names if (match := _BLOCK.fullmatch(name))]
    return not blocks or any(match[3] == "bias" for match in blocks)


def _place(name: str, num_layers: int) -> tuple[int, str] | None:
    """Return the head of a tensor, and the name that its program gives it; None for another
    tensor."""
    if match := _BLOCK.fullmatch(name):
        return int(match[1]), f"{int(match[2])}.linear.{match[3]}"
    if match := _HEAD.fullmatch(name):
        return int(match[1]), f"{num_layers}.weight"
    if match := _NAME.fullmatch(name):
        return int(match[1]), f"{match[2]}.{match[3] or ''}{match[4]}"
    return None


def num_heads_in(spec: MedusaSpec, names: Iterable[str]) -> int:
    """Return how many heads a checkpoint has: as many as config.json counts, or more.

    Those of FasterDecoding have five heads, of which their config.json counts two.
    """
    found = {place[0] for name in names if (place := _place(name, spec.num_layers))}
    more = spec.num_heads
    while more in found and more < MAX_HEADS:
        more += 1
    return more


def head_tensors(spec: MedusaSpec, names: Iterable[str], where: str) -> list[dict[str, str]]:
    """Return for each head the names of its tensors, by those that its program gives them.

    Raises ModelError for names that are no head's, and for heads that lack tensors.
    """
    heads: list[dict[str, str]] = [{} for _ in range(spec.num_heads)]
    strange, product = [], f"{spec.num_layers}.weight"
    for name in names:
        found = _place(name, spec.num_layers)
        if spec.shares_head and _SHARED_HEAD.fullmatch(name):
            for tensors in heads:
                tensors[product] = name
        elif found is None:
            strange.append(name)
        elif found[0] < spec.num_heads:
            heads[found[0]][found[1]] = name
    kinds = ("weight", "bias") if spec.has_bias else ("weight",)
    expected = {f"{layer}.linear.{kind}" for layer in range(spec.num_layers) for kind in kinds} | {
        product
    }
    problems = [f"{show(name)} is no tensor of a Medusa head" for name in strange[:5]]
    for number, tensors in enumerate(heads):
        lacking, more = sorted(expected - set(tensors)), sorted(set(tensors) - expected)
        problems += [f"head {number} lacks {name}" for name in lacking]
        problems += [f"head {number} has {name}, which is not expected" for name in more]
    if problems:
        raise ModelError(
            f"{where}: not the Medusa heads that config.json describes ({spec.num_heads} heads of "
            f"{spec.num_layers} layers, tensors medusa_lm_head.HEAD.LAYER.linear.weight and so on):"
            + "".join(f"\n  - {problem}" for problem in problems[:20])
        )
    return heads
