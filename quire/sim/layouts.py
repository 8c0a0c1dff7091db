"""Layouts of a model over several devices: tensor, context and expert parallelism inside a node,
stages of a pipeline across nodes; and which of them to take, with the reasons.

All numbers are computed: a rank's bytes and operations from its program (quire/program/shard.py),
over the device's rates, and the bytes it receives over the links. Nothing here was measured, and a
layout that is computed need not be one that Quire runs on such devices.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from quire.base.errors import SettingError
from quire.config.memory import MemoryNeeds, num_blocks_of
from quire.execute.gpu.limits import NCCL_BYTES
from quire.program.comm_ops import num_exchanges
from quire.program.cost import StepShape
from quire.program.declarations import PIECE_POSITIONS
from quire.program.degrees import check_degree
from quire.program.expert_parallel import SPLIT_EXPERTS, even_placement, mixtures
from quire.program.ops import Embed
from quire.program.program import Program
from quire.program.row_parallel import TpMode
from quire.program.shard import shard
from quire.sim.cost import roofline_ms
from quire.sim.links import Links
from quire.sim.plan import Planner, SizedModel, fitted

MAX_DEVICES = 1024
# Positions are divided where each rank has so many pieces of the cache: shorter requests gain
# nothing.
_MIN_PIECES = 16


@dataclass(frozen=True, slots=True, order=True)
class Layout:
    """tensor: ranks that share the heads of each layer. experts: whole experts are distributed over
    them. stages: of the pipeline. context: ranks that have the same heads and divide the positions
    of the KV cache. One replica of the model takes tensor * context * stages devices."""

    tensor: int
    stages: int = 1
    experts: bool = False
    context: int = 1

    @property
    def ranks(self) -> int:
        """Ranks of a stage."""
        return self.tensor * self.context

    @property
    def devices(self) -> int:
        """Devices of one replica."""
        return self.ranks * self.stages

    def __str__(self) -> str:
        parts = [f"TP {self.tensor}"] if self.tensor > 1 else []
        parts += ["EP"] if self.experts else []
        parts += [f"CP {self.context}"] if self.context > 1 else []
        parts += [f"PP {self.stages}"] if self.stages > 1 else []
        return " x ".join(parts).replace(" x EP", " + EP") or "one device"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutPlan:
    """One layout by the numbers. needs: of its fullest device. received_bytes: by a rank for a
    decoded token, exchanges and messages. one_ms: of a token of one request alone. requests: that
    decode at once in one replica, as its KV cache holds them. tokens_per_s: of all of them.
    prefill_s: of one prompt of the compared length, alone. speedups: over one device that holds all
    (computed)."""

    layout: Layout
    needs: MemoryNeeds
    problem: str
    received_bytes: int
    one_ms: float
    requests: int
    tokens_per_s: float
    prefill_s: float
    speedup_of_one: float
    speedup_of_all: float

    @property
    def efficiency(self) -> float:
        """The speedup of all requests over the number of devices."""
        return self.speedup_of_all / self.layout.devices


class LayoutPlanner:
    """Plans layouts of a sized model. num_devices: in all. num_tokens: the depth of requests;
    requests: how many decode at once, on all devices, where the KV cache holds them."""

    def __init__(
        self,
        planner: Planner,
        sized: SizedModel,
        links: Links,
        *,
        num_devices: int,
        num_tokens: int,
        requests: int,
        mode: TpMode = TpMode.EXACT,
    ) -> None:
        if not 1 <= num_devices <= MAX_DEVICES:
            raise SettingError(f"--devices is {num_devices}; 1 to {MAX_DEVICES} are allowed")
        self._planner, self._sized, self.links, self._mode = planner, sized, links, mode
        self.num_devices, self.num_tokens, self.requests = num_devices, num_tokens, requests
        self._share = cache(self._largest_share)
        self._costs = cache(self._cost_ms)

    def plans(self) -> list[LayoutPlan]:
        """Return all layouts: tensor and context parallelism within a node, in powers of two; the
        latter for long requests, in one stage."""
        return [self._plan(layout) for layout in self._layouts()]

    def _layouts(self) -> Iterator[Layout]:
        program = self._sized.program
        tensor = 1
        while tensor <= min(self.links.per_node, self.num_devices):
            stages = 1
            while tensor * stages <= self.num_devices and stages <= len(program.layer_starts):
                for experts in (False, True):
                    if self._works(tensor, experts=experts):
                        yield Layout(tensor, stages, experts)
                stages *= 2
            yield from self._contexts(tensor)
            tensor *= 2

    def _contexts(self, tensor: int) -> Iterator[Layout]:
        """Yield the layouts that divide positions over ranks with the same heads."""
        context = 2
        while tensor * context <= min(self.links.per_node, self.num_devices):
            is_long = self.num_tokens >= _MIN_PIECES * PIECE_POSITIONS * context
            if is_long and self._mode is TpMode.EXACT and self._works(tensor, context=context):
                yield Layout(tensor, context=context)
            context *= 2

    def _works(self, tensor: int, *, experts: bool = False, context: int = 1) -> bool:
        program = self._sized.program
        try:
            if experts and (tensor == 1 or not any(mixtures(program))):
                return False
            placement = even_placement(program, tensor) if experts else SPLIT_EXPERTS
            check_degree(program, tensor * context, placement, context)
        except SettingError:
            return False
        return True

    def _largest_share(self, tensor: int, experts: bool, context: int) -> Program:
        """Return the program of rank 0, which has the units that do not divide."""
        program = self._sized.program
        placement = even_placement(program, tensor) if experts else SPLIT_EXPERTS
        return shard(
            program,
            degree=tensor * context,
            rank=0,
            placement=placement,
            mode=self._mode,
            context=context,
        )

    def _plan(self, layout: Layout) -> LayoutPlan:
        needs = self._needs(layout)
        replicas = self.num_devices // layout.devices
        requests = max(self.requests // replicas, 1)
        planner, asked = self._planner, self._planner.concurrency
        of_replica = None if asked is None else -(-asked // replicas)
        memory, problem = fitted(needs, planner.memory, concurrency=of_replica)
        if memory is not None:  # more would wait for the blocks of others
            held = memory.num_blocks // num_blocks_of(self.num_tokens, needs.block_size)
            requests = max(min(requests, held), 1)
        one_ms = self._token_ms(layout, 1)
        # As many groups of requests as stages, so that each stage has work.
        group = -(-requests // layout.stages)
        slowest_ms = self._stage_ms(layout, group)
        tokens_per_s = 1e3 * requests / (layout.stages * slowest_ms)
        whole = Layout(1)
        return LayoutPlan(
            layout=layout,
            needs=needs,
            problem=problem,
            received_bytes=self._received_bytes(layout),
            one_ms=one_ms,
            requests=requests,
            tokens_per_s=tokens_per_s,
            prefill_s=self._prefill_s(layout),
            speedup_of_one=self._token_ms(whole, 1) / one_ms,
            speedup_of_all=tokens_per_s * self._stage_ms(whole, requests) / (1e3 * requests),
        )

    # ---- memory

    def _needs(self, layout: Layout) -> MemoryNeeds:
        """Return the needs of the fullest device."""
        share = self._share_of(layout)
        weights = _stage_weight_bytes(share, layout.stages, self._part(layout))
        token_bytes = sum(
            -(-cache.layer_token_bytes * -(-cache.layers // layout.stages) // cache.ranks)
            for cache in share.caches
        )
        needs = self._sized.needs
        if layout.context > 1:
            needs = replace(needs, block_size=layout.context * PIECE_POSITIONS)
        return replace(
            needs,
            weights_bytes=weights,
            token_bytes=token_bytes,
            exchange_bytes=NCCL_BYTES * (layout.ranks > 1 and self._planner.device.is_gpu),
        )

    def _share_of(self, layout: Layout) -> Program:
        return self._share(layout.tensor, layout.experts, layout.context)

    def _part(self, layout: Layout) -> float:
        """Return the share of the layers that the largest stage has."""
        layers = max(len(self._sized.program.layer_starts), 1)
        return -(-layers // layout.stages) / layers

    # ---- time

    def _segment_ms(self, layout: Layout, segment: str, rows: int) -> float:
        """Return milliseconds of a segment that all ranks of a stage compute together."""
        return self._costs(layout.tensor, layout.experts, layout.context, segment, rows)

    def _cost_ms(self, tensor: int, experts: bool, context: int, segment: str, rows: int) -> float:
        step = StepShape([1] * rows, [self.num_tokens - 1] * rows)
        return self._step_ms(self._share(tensor, experts, context), segment, step)

    def _step_ms(self, share: Program, segment: str, step: StepShape) -> float:
        device, links = self._planner.device, self.links
        cost = self._planner.costs_of(share).segment_cost(segment, step)
        whole = self._planner.costs_of(self._sized.program)
        computed_ms = roofline_ms(
            cost,
            gb_per_s=device.gb_per_s,
            product_gflop_per_s=device.gflop_per_s(whole.product_precision),
            attention_gflop_per_s=device.gflop_per_s(str(share.caches[0].dtype)),
        )
        received_ms = cost.comm_bytes / links.node_gb_per_s / 1e6
        waited_ms = num_exchanges(share.segments[segment]) * links.exchange_us / 1e3
        return computed_ms + received_ms + waited_ms

    def _stage_ms(self, layout: Layout, rows: int) -> float:
        """Return milliseconds of the slowest stage; the last one has the head."""
        ms = self._segment_ms(layout, "trunk", rows) * self._part(layout)
        if layout.stages > 1:
            ms += self._message_ms(layout, rows)
        return ms + self._segment_ms(layout, "head", rows)

    def _prefill_s(self, layout: Layout) -> float:
        """Return seconds of a prompt of num_tokens alone, in steps of the largest size: these grow
        with their depth, so that a first, a middle and a last one give the mean (Simpson's
        rule)."""
        size = min(self._sized.step_tokens, self.num_tokens)
        num_steps, last = -(-self.num_tokens // size), self.num_tokens - size
        first_ms, middle_ms, last_ms = (
            self._step_ms(self._share_of(layout), "trunk", StepShape([size], [start]))
            for start in (0, last // 2, last)
        )
        mean_ms = (first_ms + 4 * middle_ms + last_ms) / 6
        stage_ms = mean_ms * self._part(layout)
        if layout.stages > 1:
            stage_ms += self._message_ms(layout, size)
        return stage_ms * (num_steps + layout.stages - 1) / 1e3

    def _token_ms(self, layout: Layout, rows: int) -> float:
        """Return milliseconds of a step through all stages."""
        ms = self._segment_ms(layout, "trunk", rows) + self._segment_ms(layout, "head", rows)
        return ms + (layout.stages - 1) * self._message_ms(layout, rows)

    def _message_ms(self, layout: Layout, rows: int) -> float:
        """Return milliseconds to send a stage's rows on: each rank sends its columns."""
        row_bytes = self._row_bytes() / layout.ranks
        crosses = layout.devices > self.links.per_node
        rate = self.links.network_gb_per_s if crosses else self.links.node_gb_per_s
        return rows * row_bytes / rate / 1e6 + self.links.message_us / 1e3

    def _row_bytes(self) -> int:
        hidden = self._sized.program.outputs["hidden"]
        return hidden.width * hidden.dtype.itemsize

    def _received_bytes(self, layout: Layout) -> int:
        step = StepShape([1], [self.num_tokens - 1])
        share = self._share_of(layout)
        exchanged = self._planner.costs_of(share).step_cost(step).comm_bytes
        sent = (layout.stages - 1) * self._row_bytes() // layout.ranks
        return exchanged + sent


def _stage_weight_bytes(share: Program, stages: int, part: float) -> int:
    """Return the weights of the fullest stage: a part of the layers, and the embedding or the
    head."""
    if stages == 1:
        return share.weight_bytes
    embeds = {op.weight for op in share.segments["trunk"] if isinstance(op, Embed)}
    heads = {name for op in share.segments["head"] for name in op.weights}
    ends = [sum(share.weights[name].num_bytes for name in names) for names in (embeds, heads)]
    shared = sum(share.weights[name].num_bytes for name in embeds | heads)
    return round((share.weight_bytes - shared) * part) + max(ends)


def recommended(plans: list[LayoutPlan], num_devices: int) -> LayoutPlan | None:
    """Return the layout of the most tokens per second on all devices, as replicas of it: of those
    within 2 % the one with the fastest single request; None where none fits."""
    fitting = [plan for plan in plans if not plan.problem]
    if not fitting:
        return None

    def total(plan: LayoutPlan) -> float:
        return plan.tokens_per_s * (num_devices // plan.layout.devices)

    most = max(map(total, fitting))
    return min((one for one in fitting if total(one) >= 0.98 * most), key=lambda one: one.one_ms)


def reasons(
    plans: list[LayoutPlan], chosen: LayoutPlan, links: Links, num_devices: int
) -> Iterator[str]:
    """Yield why a layout is recommended."""
    layout, replicas = chosen.layout, num_devices // chosen.layout.devices
    smallest = min(plan.layout.devices for plan in plans if not plan.problem)
    if smallest > 1:
        yield f"the model needs {smallest} devices at least for its weights and KV cache"
    elif layout.devices == 1:
        yield "one device holds the model"
    else:
        yield "one device would hold the model, but more give more tokens to so many requests"
    if layout.tensor > 1:
        yield (
            f"tensor parallelism stays in a node: a rank receives "
            f"{chosen.received_bytes / 1e3:,.0f} kB a token at {links.node_gb_per_s:g} GB/s, "
            f"{links.node_gb_per_s / links.network_gb_per_s:.0f}x the rate between nodes"
        )
    if layout.experts:
        yield "whole experts on ranks: products keep their width, and less is exchanged or read"
    if layout.stages > 1:
        yield (
            "pipeline stages send one row a token, which slow links bear; a single request gains "
            "nothing from them"
        )
    yield from _context_reasons(plans, chosen)
    fitting = [plan for plan in plans if not plan.problem]
    small = min(fitting, key=lambda plan: (plan.layout.devices, plan.one_ms))
    if small.layout.devices < layout.devices:
        others = num_devices // small.layout.devices
        yield (
            f"{others} replicas of {small.layout} would read the weights {others} times and give "
            f"{others * small.tokens_per_s:,.0f} tokens/s in all, against "
            f"{replicas * chosen.tokens_per_s:,.0f}"
        )
    if replicas > 1:
        yield (
            f"{replicas} replicas of {layout.devices} device{'s' * (layout.devices > 1)}: replicas "
            f"exchange nothing; --data-parallel-size {replicas} in one machine, else `quire route`"
        )
    fastest = min(fitting, key=lambda plan: plan.one_ms)
    if fastest.layout != layout:
        yield (
            f"for the latency of one request take {fastest.layout}: {fastest.one_ms:.3g} ms a "
            f"token ({fastest.speedup_of_one:.2g}x one device), against {chosen.one_ms:.3g} ms"
        )


def _context_reasons(plans: list[LayoutPlan], chosen: LayoutPlan) -> Iterator[str]:
    """Yield why positions are divided or not; nothing for short requests."""
    layout = chosen.layout
    divided = [plan for plan in plans if plan.layout.context > 1]
    if layout.context > 1:
        by_heads = next((p for p in plans if p.layout == Layout(layout.ranks)), None)
        if by_heads is None:
            yield f"heads do not divide over {layout.ranks} ranks, and the KV cache's positions do"
        else:
            yield f"positions are divided: {_compared(chosen, by_heads)}"
    elif fitting := [plan for plan in divided if not plan.problem]:
        other = min(fitting, key=lambda plan: -plan.tokens_per_s / plan.layout.devices)
        yield f"positions are not divided: {_compared(chosen, other)}"
    elif divided:
        yield "dividing positions needs no less memory than dividing heads does"


def _compared(one: LayoutPlan, other: LayoutPlan) -> str:
    """Return what a layout has instead of another, in words and numbers."""
    return f"{_in_numbers(one)}, instead of {_in_numbers(other)}"


def _in_numbers(plan: LayoutPlan) -> str:
    return (
        f"{plan.needs.token_bytes:,} B of KV cache a token on a rank, {plan.requests} requests at "
        f"once, {plan.received_bytes / 1e3:,.0f} kB received for a token and {plan.prefill_s:.3g} "
        f"s for a prompt with {plan.layout}"
    )


def layouts_outcome(layouts: LayoutPlanner) -> dict[str, Any]:
    """Return the table of layouts and the recommendation, ready for JSON."""
    plans = layouts.plans()
    chosen = recommended(plans, layouts.num_devices)
    return {
        "devices": layouts.num_devices,
        "links": layouts.links.about,
        "exchange_us": layouts.links.exchange_us,
        "requests": layouts.requests,
        "tokens": layouts.num_tokens,
        "rates": "computed from peak rates, not measured",
        "layouts": [_row(plan, layouts.num_devices) for plan in plans],
        "recommended": None if chosen is None else str(chosen.layout),
        "reasons": []
        if chosen is None
        else list(reasons(plans, chosen, layouts.links, layouts.num_devices)),
    }


def _row(plan: LayoutPlan, num_devices: int) -> dict[str, Any]:
    layout = plan.layout
    replicas = num_devices // layout.devices
    return {
        "layout": str(layout),
        "tensor_parallel_size": layout.tensor,
        "pipeline_parallel_size": layout.stages,
        "context_parallel_size": layout.context,
        "enable_expert_parallel": layout.experts,
        "replicas": replicas,
        "fits": not plan.problem,
        "weights_bytes": plan.needs.weights_bytes,
        "kv_bytes_per_token": plan.needs.token_bytes,
        "nccl_bytes": plan.needs.exchange_bytes,
        "received_bytes_per_token": plan.received_bytes,
        "one_request_tokens_per_s": 1e3 / plan.one_ms,
        "one_request_speedup": plan.speedup_of_one,
        "requests_at_once": plan.requests,
        "prefill_s": plan.prefill_s,
        "all_tokens_per_s": replicas * plan.tokens_per_s,
        "efficiency": plan.efficiency,
    }
