"""quantize: the same program with its products' weights in few bits. A rewrite; loads nothing.

    quantize(program, "int4-g64", head="int8", keep=["layers.0.*=none"])

Every matrix gets the scheme, experts each by itself; the head gets its own (by default int8 where
the rest is int4, since its errors go straight into the logits, and fp8 where it is fp8-block). A
router stays in its dtype: it is small, and its errors change which experts are chosen. Rules then
say otherwise for weights by name. Tables that are only gathered from, vectors and the KV cache
(kv_cache.py) stay as they are. Executors quantize while they load. Always holds: a rule that
matches nothing is an error, and of several the last one counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from quire.base.errors import SettingError
from quire.program.declarations import Weight, WeightForm
from quire.program.expert_ops import Route
from quire.program.ops import Linear
from quire.program.program import Program
from quire.quant.scheme import PLAIN, SCHEMES, Rule, canonical, parse_rule

AUTO = "auto"


def quantize(
    program: Program,
    scheme: str,
    *,
    head: str = AUTO,
    keep: Sequence[str] = (),
    stored: Mapping[str, str] = MappingProxyType({}),
) -> Program:
    """Return the program with schemes on its matrices.

    scheme: of all products, as scheme_names() lists them, or "auto": as `stored` says, schemes by
    the names of weights that are quantized in their file already, and none where it says nothing.
    head: of the product that gives the logits; "auto" is int8 for int4, fp8 for fp8-block (an
    embedding that is the head too has its scales by row then), else as the rest. keep:
    rules "PATTERN=PRECISION" over weight names. Where a program's own dtype is meant, "none" says
    so, or its name (bf16, f32). Raises SettingError for what is no precision, or a rule that
    matches no product.
    """
    if scheme == AUTO:
        rest = head_rest = {name: stored.get(name, "") for name in program.weights}
    else:
        same = _precision(program, scheme, "quantization")
        rest = dict.fromkeys(program.weights, same)
        head_rest = dict.fromkeys(program.weights, _head_default(same))
    if head != AUTO:
        head_rest = dict.fromkeys(program.weights, _precision(program, head, "head_precision"))
    rest = rest | dict.fromkeys(_routers(program), "")
    rest = rest | {name: head_rest[name] for name in _heads(program)}
    rules = [_rule(program, text) for text in keep]
    weights = {
        name: _with_scheme(weight, rest[name], rules) for name, weight in program.weights.items()
    }
    return replace(program, weights=weights)


def precision_text(program: Program) -> str:
    """Return how the products of a program are kept: "none", "int8", or "int4-g64 (embed:
    int8)"."""
    products = _products(program)
    schemes = [weight.scheme or PLAIN for weight in products]
    most = max(dict.fromkeys(schemes), key=lambda name: _bytes_of(products, name))
    others: dict[str, list[str]] = {}
    for weight, name in zip(products, schemes, strict=True):
        if name != most:
            others.setdefault(name, []).append(weight.name)
    if not others:
        return most
    listed = "; ".join(f"{_shortened(names)}: {name}" for name, names in others.items())
    return f"{most} ({listed})"


def _bytes_of(products: Sequence[Weight], scheme: str) -> int:
    return sum(weight.size for weight in products if (weight.scheme or PLAIN) == scheme)


def _shortened(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) < 3 else f"{names[0]} and {len(names) - 1} more"


def _products(program: Program) -> list[Weight]:
    return [w for w in program.weights.values() if w.form is WeightForm.MATRIX]


def _heads(program: Program) -> set[str]:
    """Return names of the weights of the products that give the logits."""
    logits = program.outputs.get("logits")
    return {
        op.weight
        for ops in program.segments.values()
        for op in ops
        if isinstance(op, Linear)
        and logits is not None
        and op.y.buffer.index == logits.buffer.index
    }


def _routers(program: Program) -> set[str]:
    """Return names of the weights of the products that give a router's logits."""
    ops = [op for ops in program.segments.values() for op in ops]
    logits = {op.x.buffer.index for op in ops if isinstance(op, Route)}
    return {op.weight for op in ops if isinstance(op, Linear) and op.y.buffer.index in logits}


def _head_default(rest: str) -> str:
    scheme = SCHEMES.get(rest)
    if scheme is None:
        return ""
    return "fp8" if scheme.is_float else "int8"


def _precision(program: Program, text: str, setting: str) -> str:
    """Return the scheme that `text` names, "" for the program's own dtype."""
    own = {weight.dtype.value for weight in _products(program)}
    if text in own:
        return ""
    try:
        return canonical(text)
    except ValueError as error:
        also = f"; {', '.join(sorted(own))} is what this model computes in (--dtype)"
        raise SettingError(f"{setting}: {error}{also}") from error


def _rule(program: Program, text: str) -> Rule:
    try:
        rule = parse_rule(text)
    except ValueError as error:
        raise SettingError(f"keep: {error}") from error
    names = [weight.name for weight in _products(program)]
    if not any(rule.matches(name) for name in names):
        shown = names if len(names) <= 8 else [*names[:6], "...", *names[-2:]]
        raise SettingError(
            f"keep: {rule.pattern!r} matches no product of this model; they are "
            f"{', '.join(shown)} (quire program prints all)"
        )
    scheme = _precision(program, rule.precision, "keep")
    return Rule(pattern=rule.pattern, precision=scheme)


def _with_scheme(weight: Weight, scheme: str, rules: Sequence[Rule]) -> Weight:
    if weight.form is not WeightForm.MATRIX:
        return weight
    for rule in rules:
        if rule.matches(weight.name):
            scheme = rule.precision
    return replace(weight, scheme=scheme)
