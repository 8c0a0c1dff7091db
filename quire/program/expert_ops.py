"""Route and Experts: a mixture of experts as two operations.

The router's logits come from a Linear. Route turns them into routing weights [R, E], zero for each
expert that a row did not choose. Experts computes the chosen ones. A shared expert behind a gate is
the same with one expert (E = 1, sigmoid).

Row Rule: a row's choice depends on its own logits (a tie goes to the lower expert id), and its
experts' outputs are summed in the order of their ids, whichever rows share an expert.

Letters: R rows, E experts, H hidden width, I inner width of an expert.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from quire.program.comm_ops import share_of
from quire.program.cost import Cost, StepShape
from quire.program.declarations import Declarations, Weight, WeightForm
from quire.program.forms import QUANTIZING_OPS, ActivationForm, RouterScore, RoutingForm
from quire.program.operation import Operation, WeightName, check_width
from quire.program.tensors import DType, View


@dataclass(frozen=True, slots=True, kw_only=True)
class Route(Operation):
    """y[R, E] = routing weights by the router's logits x[R, E]: of `top_k` experts, 0 elsewhere.

    Scores are softmax(x) or sigmoid(x). The experts with the largest score + bias are chosen; where
    `groups` > 0, only among the `top_groups` groups of consecutive experts in which the two largest
    such sums add up to most (DeepSeek-V3). A chosen expert's weight is its score, divided by the
    sum of the chosen scores (in the order of ids) where `form` says so, times `scale`.
    """

    kind = "route"
    reads = ("x",)
    writes = ("y",)

    x: View
    y: View
    score: RouterScore
    form: RoutingForm
    top_k: int
    bias: WeightName | None = None
    groups: int = 0
    top_groups: int = 0
    scale: float = 1.0

    def check(self, declared: Declarations) -> None:
        """Both views are f32 with a column per expert; counts fit the experts."""
        experts = self.x.width
        check_width("y", self.y, experts)
        for name, view in (("x", self.x), ("y", self.y)):
            if view.dtype is not DType.F32:
                raise ValueError(f"{name} is {view.dtype}; routing is computed in f32")
        if not 1 <= self.top_k <= experts:
            raise ValueError(f"top_k is {self.top_k}; 1 to {experts} experts can be chosen")
        if self.bias is not None and declared.weights[self.bias].rows != experts:
            raise ValueError(f"{self.bias} has {declared.weights[self.bias].rows} rows")
        if self.groups:
            self._check_groups(experts)

    def _check_groups(self, experts: int) -> None:
        if self.groups < 0 or experts % self.groups:
            raise ValueError(f"groups is {self.groups}; {experts} experts are no multiple of it")
        if not 1 <= self.top_groups <= self.groups:
            raise ValueError(f"top_groups is {self.top_groups}; 1 to {self.groups} are allowed")
        if self.top_k > self.top_groups * (experts // self.groups):
            raise ValueError(f"{self.top_groups} groups hold fewer than {self.top_k} experts")

    def detail(self, declared: Declarations) -> str:
        """See Operation."""
        words = f"{self.top_k} of {self.x.width} {self.score}"
        words += " normalized" if self.form is RoutingForm.NORMALIZED else ""
        words += " + bias" if self.bias is not None else ""
        words += f" in {self.top_groups} of {self.groups} groups" if self.groups else ""
        return words + (f" x {self.scale:g}" if self.scale != 1.0 else "")

    def _cost(self, declared: Declarations, step: StepShape) -> Cost:
        rows = step.rows(self.x.buffer.rows)
        bias_bytes = 0 if self.bias is None else declared.weights[self.bias].num_bytes
        return Cost(other_ops=rows * (4 + self.top_k) * self.x.width, weight_bytes=bias_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts(Operation):
    """y[R, H] = sum over the experts e of a row, in order, of routing[:, e] * mlp_e(x[R, H]).

    mlp_e(x) = down_e @ (form(gate) * up), with gate and up the halves of gate_up_e @ x; gate, up
    and their product are rounded to x's dtype, down's output is not rounded. An expert is computed
    for a row if its routing weight is not 0; of more than `top_k` in a row the first count.

    gate_up [E, 2 I, H] and down [E, H, I] are weights with an expert axis. Of several ranks
    (degree > 1) each has the rows of its columns: of gate and of up `share_of`(I, unit, ...), which
    the ranks exchange before down, and as many of down as y is wide. Under expert parallelism
    (holders: bit r of an expert's number is set where rank r has it) a rank has the weights of its
    own experts, and y is `share_of`(H, unit, ...), summed from the outputs of all ranks.
    """

    kind = "experts"
    reads = ("x", "routing")
    writes = ("y",)
    is_row_wise = False

    x: View
    routing: View
    y: View
    gate_up: WeightName
    down: WeightName
    form: ActivationForm
    top_k: int
    rank: int = 0
    degree: int = 1
    unit: int = 0
    holders: tuple[int, ...] = ()

    @property
    def is_mixture(self) -> bool:
        """Whether rows choose among experts; a shared expert behind a gate is a layer of one."""
        return self.routing.width > 1

    @property
    def own_experts(self) -> tuple[int, ...]:
        """The experts that this rank has the weights of, in order."""
        if not self.holders:
            return tuple(range(self.routing.width))
        return tuple(e for e, holders in enumerate(self.holders) if holders >> self.rank & 1)

    @property
    def exchanges(self) -> int:
        """See Operation."""
        return 1 if self.degree > 1 else 0

    def first_rank(self, expert: int) -> int:
        """Return the lowest rank that has an expert, under expert parallelism."""
        return (self.holders[expert] & -self.holders[expert]).bit_length() - 1

    @property
    def expected_share(self) -> float:
        """Share of all pairs of a row and an expert that this rank computes, where rows choose all
        experts alike."""
        if not self.holders:
            return 1.0
        return sum(1 / self.holders[e].bit_count() for e in self.own_experts) / len(self.holders)

    def own_inner(self, inner: int) -> int:
        """Return how many of `inner` inner columns this rank computes."""
        if self.degree == 1 or self.holders:
            return inner
        start, end = share_of(inner, self.unit, self.rank, self.degree)
        return end - start

    def check(self, declared: Declarations) -> None:
        """Weights have an expert per column of `routing` and the views' widths."""
        gate_up, down = declared.weights[self.gate_up], declared.weights[self.down]
        experts, own = self.routing.width, len(self.own_experts)
        for weight in (gate_up, down):
            if weight.form is not WeightForm.MATRIX or weight.experts != own:
                raise ValueError(f"{weight.name} has {weight.experts} experts, not {own}")
        if gate_up.expert_rows != 2 * self.own_inner(down.columns):
            raise ValueError(f"{gate_up.name} has {gate_up.expert_rows} rows, not 2 per inner")
        if not 1 <= self.top_k <= experts:
            raise ValueError(f"top_k is {self.top_k}; there are {experts} experts")
        check_width("x", self.x, gate_up.columns)
        if self.holders:
            self._check_holders()
        else:
            check_width("y", self.y, down.expert_rows)
        if self.degree == 1 and self.y.width != self.x.width:
            raise ValueError(f"y is {self.y.width} wide, x {self.x.width}")
        for name, view in (("routing", self.routing), ("y", self.y)):
            if view.dtype is not DType.F32:
                raise ValueError(f"{name} is {view.dtype}; it must be f32")

    def _check_holders(self) -> None:
        if len(self.holders) != self.routing.width or self.degree < 2:
            raise ValueError(
                f"holders of {len(self.holders)} experts over {self.degree} ranks; there are "
                f"{self.routing.width} experts"
            )
        if not all(0 < holders < 1 << self.degree for holders in self.holders):
            raise ValueError(f"an expert is on none of the {self.degree} ranks, or on another")
        start, end = share_of(self.x.width, self.unit, self.rank, self.degree)
        check_width("y", self.y, end - start)

    def detail(self, declared: Declarations) -> str:
        """See Operation."""
        weights = ", ".join(str(declared.weights[name]) for name in self.weights)
        words = f"{self.top_k} of {self.routing.width}: {weights} {self.form}"
        if self.holders:
            words += f", experts {_ranges(self.own_experts)}, all_to_all of outputs"
        return words + (f", rank {self.rank} of {self.degree}" if self.degree > 1 else "")

    def _cost(self, declared: Declarations, step: StepShape) -> Cost:
        rows = step.rows(self.x.buffer.rows)
        gate_up, down = declared.weights[self.gate_up], declared.weights[self.down]
        experts, pairs = self.routing.width, rows * self.top_k
        held, own_pairs = len(self.own_experts), pairs * self.expected_share
        read = expected_experts(rows, self.top_k, experts) * held / experts
        quantized = sum(w.columns for w in (gate_up, down) if w.scheme)
        others = down.columns - self.own_inner(down.columns)
        comm_bytes = pairs * others * self.x.dtype.itemsize
        if self.holders:  # this rank's columns of the outputs of all other ranks' experts
            comm_bytes = round((pairs - own_pairs) * self.y.width * self.y.dtype.itemsize)
        return Cost(
            product_ops=round(2 * own_pairs * (gate_up.size + down.size) / held),
            other_ops=round(
                own_pairs * (5 * down.columns + 2 * down.expert_rows + QUANTIZING_OPS * quantized)
            ),
            weight_bytes=round(read * sum(_expert_bytes(w) for w in (gate_up, down))),
            comm_bytes=comm_bytes,
        )


def _ranges(numbers: tuple[int, ...]) -> str:
    """Return ascending numbers as text, as in 0-3,7."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(f"{a}-{b}" if b > a else f"{a}" for a, b in runs)


def expected_experts(rows: int, top_k: int, experts: int) -> float:
    """Return how many distinct experts `rows` rows are expected to choose, each `top_k` of
    `experts` with equal probability."""
    return experts * (1.0 - (1.0 - top_k / experts) ** rows)


def expert_reads(program: Declarations, ops: Iterable[object]) -> list[tuple[int, float]]:
    """Return (bytes of all experts, share of them that a row leaves out) by shape, over `ops`.

    R rows are expected to read the sum of bytes * (1 - share ** R). Bytes of weights that
    other operations read do not depend on R.
    """
    found: dict[float, int] = {}
    for op in ops:
        if isinstance(op, Experts):
            left_out = 1.0 - op.top_k / op.routing.width
            num_bytes = sum(program.weights[name].num_bytes for name in op.weights)
            found[left_out] = found.get(left_out, 0) + num_bytes
    return [(num_bytes, left_out) for left_out, num_bytes in found.items()]


def _expert_bytes(weight: Weight) -> int:
    return weight.expert_rows * weight.row_bytes
