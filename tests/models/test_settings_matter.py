"""Parity is sensitive to every setting: with each setting disabled, logits exceed the tolerance."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from quire.models.registry import open_model
from quire.models.spec import ModelSpec, RopeSettings
from quire.program.forms import ActivationForm, RouterScore
from tests.cases import each_case
from tests.models import cases_experts, cases_gemma, cases_phi3
from tests.models.generate import executor_of, logits_of
from tests.models.record import relative_error

ALLOWED = 1e-4  # the tolerance of parity
FAMILIES = (cases_gemma, cases_phi3, cases_experts)
CASES = {case.name: case for family in FAMILIES for case in family.CASES}


def _windows(spec: ModelSpec, windows: tuple[int, ...]) -> ModelSpec:
    return replace(spec, attention=replace(spec.attention, windows=windows))


def longer_windows(spec: ModelSpec) -> ModelSpec:
    return _windows(spec, tuple(window + 1 if window else 0 for window in spec.attention.windows))


def no_windows(spec: ModelSpec) -> ModelSpec:
    return _windows(spec, ())


def other_layers_windows(spec: ModelSpec) -> ModelSpec:
    return _windows(spec, spec.attention.windows[1:] + spec.attention.windows[:1])


def _rotary(spec: ModelSpec, change: Callable[[RopeSettings], RopeSettings]) -> ModelSpec:
    assert spec.rotary is not None
    return replace(spec, rotary=replace(spec.rotary, full=change(spec.rotary.full)))


def plain_angles(spec: ModelSpec) -> ModelSpec:
    return _rotary(
        spec, lambda rope: RopeSettings(theta=rope.theta, rotary_share=rope.rotary_share)
    )


def swapped_lists(spec: ModelSpec) -> ModelSpec:
    return _rotary(
        spec,
        lambda rope: replace(
            rope, short_factors=rope.long_factors, long_factors=rope.short_factors
        ),
    )


def cosines_unscaled(spec: ModelSpec) -> ModelSpec:
    return _rotary(spec, lambda rope: replace(rope, attention_factor=1.0))


def one_rope(spec: ModelSpec) -> ModelSpec:
    assert spec.rotary is not None
    return replace(spec, rotary=replace(spec.rotary, windowed=None))


def scale_by_head_dim(spec: ModelSpec) -> ModelSpec:
    return replace(spec, attention=replace(spec.attention, scale=None))


def no_attention_cap(spec: ModelSpec) -> ModelSpec:
    return replace(spec, attention=replace(spec.attention, soft_cap=0.0))


def no_logit_cap(spec: ModelSpec) -> ModelSpec:
    return replace(spec, head=replace(spec.head, soft_cap=0.0))


def norms_as_stored(spec: ModelSpec) -> ModelSpec:
    return replace(spec, norm=replace(spec.norm, offset=0.0))


def embeddings_unscaled(spec: ModelSpec) -> ModelSpec:
    return replace(spec, embedding=replace(spec.embedding, scale=1.0))


def exact_gelu(spec: ModelSpec) -> ModelSpec:
    return replace(spec, mlp=replace(spec.mlp, activation=ActivationForm.GELU))


def other_activation(spec: ModelSpec) -> ModelSpec:
    return replace(spec, mlp=replace(spec.mlp, activation=ActivationForm.RELU))


def _experts(spec: ModelSpec, **changes: Any) -> ModelSpec:
    assert spec.experts is not None
    return replace(spec, experts=replace(spec.experts, **changes))


def other_weights_of_experts(spec: ModelSpec) -> ModelSpec:
    assert spec.experts is not None
    return _experts(spec, normalized=not spec.experts.normalized)


def fewer_experts(spec: ModelSpec) -> ModelSpec:
    assert spec.experts is not None
    return _experts(spec, top_k=spec.experts.top_k - 1)


def scores_by_softmax(spec: ModelSpec) -> ModelSpec:
    return _experts(spec, score=RouterScore.SOFTMAX)


def all_groups(spec: ModelSpec) -> ModelSpec:
    return _experts(spec, groups=0, top_groups=0)


def experts_unscaled(spec: ModelSpec) -> ModelSpec:
    return _experts(spec, scale=1.0)


Change = Callable[[ModelSpec], ModelSpec]
TURNED_OFF: dict[str, tuple[Change, ...]] = {
    "gemma_mqa_tied": (norms_as_stored, embeddings_unscaled),
    "gemma_untied": (norms_as_stored, embeddings_unscaled, other_activation),
    "gemma2_caps": (
        longer_windows, no_windows, other_layers_windows, scale_by_head_dim, no_attention_cap,
        no_logit_cap, norms_as_stored, embeddings_unscaled,
    ),
    "gemma2_untied": (longer_windows, no_attention_cap, no_logit_cap),
    "gemma3_mqa": (
        longer_windows, no_windows, other_layers_windows, one_rope, scale_by_head_dim,
        norms_as_stored, embeddings_unscaled,
    ),
    "gemma3_linear_wide_heads": (plain_angles, one_rope, longer_windows),
    "gemma3_rope_parameters": (plain_angles, one_rope, no_logit_cap, exact_gelu),
    "phi3_mqa_window": (longer_windows, no_windows, other_activation),
    "phi3_longrope_long": (plain_angles, swapped_lists, cosines_unscaled),
    "phi3_longrope_short": (plain_angles, swapped_lists, cosines_unscaled),
    "phi3_partial_tied": (plain_angles, swapped_lists, cosines_unscaled),
    "mixtral": (other_weights_of_experts, fewer_experts, other_activation),
    "qwen2_moe": (other_weights_of_experts, fewer_experts),
    "dots1_groups": (
        other_weights_of_experts, fewer_experts, scores_by_softmax, all_groups, experts_unscaled,
    ),
    "phi3_rope_parameters": (longer_windows, swapped_lists, cosines_unscaled),
}  # fmt: skip


@each_case("name", TURNED_OFF)
def test_a_wrong_setting_moves_logits_beyond_the_parity_tolerance(
    name: str, tmp_path: Path
) -> None:
    case = CASES[name]
    folder = case.write(tmp_path)
    spec = open_model(folder)
    right = logits_of(executor_of(spec, folder, kind="native"), case.token_ids, max_positions=512)
    for change in TURNED_OFF[name]:
        executor = executor_of(change(spec), folder, kind="native")
        moved = relative_error(logits_of(executor, case.token_ids, max_positions=512), right)
        assert moved > ALLOWED, change.__name__
