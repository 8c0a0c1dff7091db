"""The feed-forward half of families with experts, over ProgramBuilder.

`feed_forward` is what a builder calls: experts in the layers that have them, the gated half of
layers.py in the others. Letters: T token rows, E experts, H hidden width, I inner width.
"""

from __future__ import annotations

from collections.abc import Iterator

from quire.base.errors import ConfigError
from quire.models import layers
from quire.models.spec import ExpertsSpec, ModelSpec
from quire.program.builder import ProgramBuilder
from quire.program.declarations import WeightPart
from quire.program.forms import RouterScore, RoutingForm
from quire.program.tensors import DType, View


def feed_forward(p: ProgramBuilder, spec: ModelSpec, h: View, layer: int) -> View:
    """Return what the feed-forward half of a layer adds [T, H]. Raises ConfigError for experts with
    biases."""
    experts = spec.experts
    if experts is None or layer not in experts.layers:
        return layers.gated_mlp(p, spec, h, layer)
    if spec.mlp.bias:
        raise ConfigError(
            f"{spec.architecture}: biases of experts' products (mlp_bias) are not supported; only "
            "false is"
        )
    added = _experts(p, spec, experts, h, layer)
    if experts.shared_size:
        p.add(added, _shared_expert(p, spec, experts, h, layer))
    return layers.to_residual(p, spec, added)


def _experts(p: ProgramBuilder, spec: ModelSpec, experts: ExpertsSpec, h: View, layer: int) -> View:
    """Return the chosen experts' outputs by their routing weights [T, H], f32."""
    name, tensors, count = f"layers.{layer}.", experts.tensors, experts.num_experts
    source = f"model.layers.{layer}.{tensors.block}."
    bias = None
    if experts.has_selection_bias:
        part = WeightPart("bias", f"{source}{tensors.selection_bias}", count)
        bias = p.vector(f"{name}router.bias", [part])
    routing = p.route(
        _logits(p, h, f"{name}router", f"{source}{tensors.router}.weight", count),
        top_k=experts.top_k,
        score=experts.score,
        form=RoutingForm.NORMALIZED if experts.normalized else RoutingForm.SCORES,
        bias=bias,
        groups=experts.groups,
        top_groups=experts.top_groups,
        scale=experts.scale,
    )
    inner = tensors.gate_proj, tensors.up_proj
    gate_up = list(_parts(experts, f"{source}experts.", inner, experts.size))
    down = list(_parts(experts, f"{source}experts.", (tensors.down_proj,), spec.hidden_size))
    return p.experts(
        h,
        routing,
        p.expert_matrix(f"{name}experts.gate_up", count, gate_up, spec.hidden_size),
        p.expert_matrix(f"{name}experts.down", count, down, experts.size),
        top_k=experts.top_k,
        form=spec.mlp.activation,
    )


def _shared_expert(
    p: ProgramBuilder, spec: ModelSpec, experts: ExpertsSpec, h: View, layer: int
) -> View:
    """Return the output of the expert that every token passes [T, H], times its gate where it has
    one.

    With a gate it is a layer of one expert; its routing weight is the sigmoid of the gate.
    """
    name, source = f"layers.{layer}.shared", f"model.layers.{layer}.{experts.tensors.block}."
    shared, size = f"{source}{experts.shared}.", experts.shared_size
    if not experts.has_shared_gate:
        f32 = DType.F32
        return layers.gated_products(
            p, spec, h, f"{name}.", shared, size, dtype=f32, out_name="shared"
        )
    rows = [WeightPart(part, f"{shared}{part}_proj.weight", size) for part in ("gate", "up")]
    down = WeightPart("down", f"{shared}down_proj.weight", spec.hidden_size)
    gate_source = f"{source}{experts.shared}_gate.weight"
    logits = _logits(p, h, f"{name}.gate", gate_source, 1)
    return p.experts(
        h,
        p.route(logits, top_k=1, score=RouterScore.SIGMOID),
        p.expert_matrix(f"{name}.gate_up", 1, rows, spec.hidden_size, shard="rows"),
        p.expert_matrix(f"{name}.down", 1, [down], size, shard="columns"),
        top_k=1,
        form=spec.mlp.activation,
    )


def _logits(p: ProgramBuilder, h: View, name: str, source: str, rows: int) -> View:
    """Return a router's logits [T, rows], f32."""
    weight = p.matrix(name, [WeightPart("router", source, rows)], h.width, shard="")
    return p.linear(h, weight, dtype=DType.F32, out_name="router")


def _parts(
    experts: ExpertsSpec, source: str, products: tuple[str, ...], rows: int
) -> Iterator[WeightPart]:
    """Yield the rows of `products` of each expert, in the order of the experts."""
    count, is_stacked = experts.num_experts, experts.tensors.stacked
    for expert in range(count):
        for product in products:
            if is_stacked:
                yield WeightPart(
                    product,
                    f"{source}{product}.weight",
                    rows,
                    first_row=expert * rows,
                    of_rows=count * rows,
                    stacked=count,
                )
            else:
                yield WeightPart(product, f"{source}{expert}.{product}.weight", rows)
