"""Routing and experts against their NumPy twins: choices, ties, groups, fewer experts than top_k,
odd shapes inside NaN; and what is counted: an expert that many rows share is read once."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.execute import reference_experts as twin
from quire.execute import reference_ops
from quire.program.expert_ops import Experts, Route
from quire.program.forms import ActivationForm, RouterScore, RoutingForm
from quire.program.tensors import Buffer, DType, Rows, View
from quire.quant.int_weights import quantize_matrix
from quire.quant.scheme import SCHEMES
from quire.weights.dtypes import round_to_bf16
from tests.cases import each_case
from tests.kernels.isas import EVERY_ISA, ISAS
from tests.kernels.one_op import OneOp, Operand, assert_close, draw

Float32s = NDArray[np.float32]


def _view(width: int, dtype: DType = DType.F32) -> View:
    return View(Buffer(0, "made", Rows.TOKENS, width, dtype), 0, width)


@dataclass(frozen=True, kw_only=True)
class Router:
    """A route operation on both sides."""

    experts: int
    top_k: int
    score: RouterScore = RouterScore.SOFTMAX
    form: RoutingForm = RoutingForm.SCORES
    bias: Float32s | None = None
    groups: int = 0
    top_groups: int = 0
    scale: float = 1.0

    def values(self) -> dict[str, Any]:
        """Fields that are neither views nor weights."""
        names = ("score", "form", "top_k", "groups", "top_groups", "scale")
        return {name: getattr(self, name) for name in names}

    def twin(self, logits: Float32s) -> Float32s:
        """The NumPy result."""
        view, bias = _view(self.experts), None if self.bias is None else "bias"
        op = Route(x=view, y=view, bias=bias, **self.values())
        return twin.route(op, logits, self.bias)

    def native(self, isa: str, logits: Float32s, num_threads: int = 2) -> Float32s:
        """The compiled result."""
        operands = [Operand(self.experts), Operand(self.experts)]
        weights = [] if self.bias is None else [("vector", "f32", self.bias)]
        op = OneOp(
            "route", operands, isa, num_threads, values=self.values(), weights=weights, max_rows=70
        )
        return op({0: logits}, num_rows=len(logits))[1]


SIGMOID, NORMALIZED = RouterScore.SIGMOID, RoutingForm.NORMALIZED
BIAS = np.random.default_rng(3).standard_normal(24).astype(np.float32)
ROUTERS = {
    "all of one": Router(experts=1, top_k=1),
    "one expert behind a gate": Router(experts=1, top_k=1, score=SIGMOID),
    "two of eight": Router(experts=8, top_k=2, form=NORMALIZED),
    "eight of 128": Router(experts=128, top_k=8),
    "all of 33": Router(experts=33, top_k=33, form=NORMALIZED),
    "by sigmoid": Router(experts=19, top_k=4, score=SIGMOID, form=NORMALIZED, scale=2.5),
    "by sigmoid and bias": Router(experts=24, top_k=5, score=SIGMOID, bias=BIAS),
    "in groups": Router(
        experts=24, top_k=4, score=SIGMOID, form=NORMALIZED, bias=BIAS, groups=6, top_groups=2
    ),
    "in groups of one": Router(experts=24, top_k=3, groups=24, top_groups=3),
}


@each_case("isa", ISAS)
@each_case("name", ROUTERS)
def test_routing_weights_are_the_twins(isa: str, name: str) -> None:
    router = ROUTERS[name]
    logits = draw(np.random.default_rng(1), 65, router.experts) * 3
    found, expected = router.native(isa, logits), router.twin(logits)
    assert np.array_equal(found != 0, expected != 0), "other experts are chosen"
    assert ((found != 0).sum(axis=1) == router.top_k).all()
    assert_close(found, expected, dtype="f32")


@each_case("isa", ISAS)
def test_a_tie_goes_to_the_lower_id(isa: str) -> None:
    router = Router(experts=40, top_k=3)
    logits = np.zeros((2, 40), np.float32)
    logits[1, [7, 30]] = 1
    for found in (router.native(isa, logits), router.twin(logits)):
        assert np.flatnonzero(found[0]).tolist() == [0, 1, 2]
        assert np.flatnonzero(found[1]).tolist() == [0, 7, 30]


@each_case("isa", ISAS)
def test_logits_that_are_no_numbers_stay_in_their_row(isa: str) -> None:
    router = Router(experts=20, top_k=2, form=NORMALIZED)
    logits = draw(np.random.default_rng(2), 3, 20)
    plain = router.native(isa, logits)
    logits[1, 5] = np.nan
    for found in (router.native(isa, logits), router.twin(logits)):
        assert np.isnan(found[1]).sum() == 2
    assert np.array_equal(router.native(isa, logits)[[0, 2]], plain[[0, 2]])


def test_groups_keep_the_choice_inside_them() -> None:
    router = ROUTERS["in groups"]
    for row in router.twin(draw(np.random.default_rng(4), 50, router.experts)):
        assert len({expert // 4 for expert in np.flatnonzero(row)}) <= router.top_groups


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """An experts operation with its weights and inputs."""

    rows: int
    experts: int
    top_k: int
    hidden: int
    inner: int
    dtype: str = "f32"
    scheme: str = ""
    form: ActivationForm = ActivationForm.SILU
    made: dict[str, Float32s] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.hidden)
        routing = np.zeros((self.rows, self.experts), np.float32)
        for row in routing:
            ids = rng.choice(self.experts, rng.integers(0, self.top_k + 1), replace=False)
            row[ids] = rng.uniform(0.1, 1, len(ids))
        self.made["x"] = draw(rng, self.rows, self.hidden, dtype=self.dtype)
        self.made["routing"] = routing
        shapes = {"gate_up": (2 * self.inner, self.hidden), "down": (self.hidden, self.inner)}
        for name, shape in shapes.items():
            self.made[name] = draw(rng, self.experts, *shape, dtype=self.dtype)

    def native(self, isa: str, num_threads: int = 2) -> tuple[Float32s, int]:
        """The compiled result, and how many experts were read."""
        op = OneOp(
            "experts",
            [Operand(self.hidden, self.dtype), Operand(self.experts), Operand(self.hidden)],
            isa,
            num_threads,
            values={"form": self.form, "top_k": self.top_k},
            weights=[
                ("matrix", self.scheme or self.dtype, self.made[name])
                for name in ("gate_up", "down")
            ],
            max_rows=self.rows + 2,
        )
        y = op({0: self.made["x"], 1: self.made["routing"]}, num_rows=self.rows)[2]
        return y, op.state["program"].experts_read

    def twin(self) -> Float32s:
        """The NumPy result."""
        is_bf16 = self.dtype == "bf16"
        op = Experts(
            x=_view(self.hidden, DType(self.dtype)),
            routing=_view(self.experts),
            y=_view(self.hidden),
            gate_up="gate_up",
            down="down",
            form=self.form,
            top_k=self.top_k,
        )
        weights = [
            [self._kept(matrix) for matrix in self.made[name]] for name in ("gate_up", "down")
        ]
        rounding = round_to_bf16 if is_bf16 else reference_ops.copy
        return twin.experts(
            op, self.made["x"], self.made["routing"], *weights, round_inner=rounding
        )

    def _kept(self, matrix: Float32s) -> reference_ops.Matrix:
        return quantize_matrix(matrix, SCHEMES[self.scheme]) if self.scheme else matrix


MIXTURES = {
    "one row": Mixture(rows=1, experts=5, top_k=3, hidden=37, inner=21),
    "gelu": Mixture(rows=9, experts=3, top_k=2, hidden=64, inner=32, form=ActivationForm.GELU_TANH),
    "one expert": Mixture(rows=40, experts=1, top_k=1, hidden=33, inner=70),
    "more experts than rows": Mixture(rows=6, experts=130, top_k=8, hidden=48, inner=16),
    "bf16": Mixture(rows=20, experts=8, top_k=2, hidden=66, inner=45, dtype="bf16"),
    "int8": Mixture(rows=20, experts=6, top_k=4, hidden=130, inner=75, scheme="int8"),
    "int4": Mixture(
        rows=17, experts=6, top_k=4, hidden=96, inner=64, scheme="int4-g32", dtype="bf16"
    ),
    "several batches": Mixture(rows=900, experts=5, top_k=4, hidden=20, inner=12),
    "an expert of more rows than a batch": Mixture(
        rows=1500, experts=2, top_k=2, hidden=9, inner=5
    ),
}


@each_case("isa", EVERY_ISA)
@each_case("name", MIXTURES)
def test_experts_are_the_twins(isa: str, name: str) -> None:
    mixture = MIXTURES[name]
    expected = mixture.twin()
    largest = np.abs(expected).max()
    # Where gate, up and their product are rounded, a sum on the other side of a tie differs.
    allowed = (2e-2 if mixture.dtype == "bf16" or mixture.scheme else 2e-5) * largest
    found = mixture.native(isa)[0]
    assert np.abs(found - expected).max() <= allowed
    assert np.array_equal(found, mixture.native(isa, num_threads=3)[0])
    assert np.array_equal(found, mixture.native(isa, num_threads=1)[0])


def test_an_expert_that_rows_share_is_read_once() -> None:
    for name in ("one row", "more experts than rows", "int8"):
        mixture = MIXTURES[name]
        chosen = (mixture.made["routing"] != 0).any(axis=0).sum()
        assert mixture.native("")[1] == chosen


def test_experts_past_top_k_of_a_row_are_left_out() -> None:
    mixture = Mixture(rows=4, experts=6, top_k=2, hidden=16, inner=8)
    mixture.made["routing"][:] = np.arange(1, 7, dtype=np.float32)
    first = mixture.native("")[0]
    mixture.made["routing"][:, 2:] = 0
    assert np.array_equal(mixture.native("")[0], first)
    np.testing.assert_allclose(mixture.twin(), first, rtol=1e-4, atol=1e-4)
