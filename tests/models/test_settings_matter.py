"""Parity proves something only if a setting gone wrong would show: each is turned off here.

Logits of the families' tiny models must then move beyond what parity allows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quire.models.registry import open_model
from quire.models.spec import ModelSpec, RopeSettings
from tests.models import cases_gemma, cases_phi3
from tests.models.generate import executor_of, logits_of
from tests.models.record import relative_error

ALLOWED = 1e-4  # by parity
CASES = {case.name: case for case in (*cases_gemma.CASES, *cases_phi3.CASES)}


def longer_windows(spec: ModelSpec) -> dict[str, Any]:
    return {"windows": tuple(window + 1 if window else 0 for window in spec.windows)}


def no_windows(spec: ModelSpec) -> dict[str, Any]:
    return {"windows": ()}


def other_layers_windows(spec: ModelSpec) -> dict[str, Any]:
    return {"windows": spec.windows[1:] + spec.windows[:1]}


def plain_angles(spec: ModelSpec) -> dict[str, Any]:
    assert spec.rope is not None
    return {"rope": RopeSettings(theta=spec.rope.theta, rotary_share=spec.rope.rotary_share)}


def swapped_lists(spec: ModelSpec) -> dict[str, Any]:
    assert spec.rope is not None
    short, long = spec.rope.short_factors, spec.rope.long_factors
    return {"rope": replace(spec.rope, short_factors=long, long_factors=short)}


def cosines_unscaled(spec: ModelSpec) -> dict[str, Any]:
    assert spec.rope is not None
    return {"rope": replace(spec.rope, attention_factor=1.0)}


def one_rope(spec: ModelSpec) -> dict[str, Any]:
    return {"local_rope": None}


def scale_by_head_dim(spec: ModelSpec) -> dict[str, Any]:
    return {"attention_scale": None}


def no_attention_cap(spec: ModelSpec) -> dict[str, Any]:
    return {"attention_soft_cap": 0.0}


def no_logit_cap(spec: ModelSpec) -> dict[str, Any]:
    return {"logit_soft_cap": 0.0}


def norms_as_stored(spec: ModelSpec) -> dict[str, Any]:
    return {"norm_offset": 0.0}


def embeddings_unscaled(spec: ModelSpec) -> dict[str, Any]:
    return {"embedding_scale": 1.0}


def exact_gelu(spec: ModelSpec) -> dict[str, Any]:
    return {"activation": "gelu"}


def other_activation(spec: ModelSpec) -> dict[str, Any]:
    return {"activation": "relu"}


Change = Callable[[ModelSpec], dict[str, Any]]
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
    "phi3_rope_parameters": (longer_windows, swapped_lists, cosines_unscaled),
}  # fmt: skip


@pytest.mark.parametrize("name", TURNED_OFF)
def test_a_setting_gone_wrong_moves_logits_beyond_what_parity_allows(
    name: str, tmp_path: Path
) -> None:
    case = CASES[name]
    folder = case.write(tmp_path)
    spec = open_model(folder)
    right = logits_of(executor_of(spec, folder, kind="native"), case.token_ids, max_positions=512)
    for change in TURNED_OFF[name]:
        executor = executor_of(replace(spec, **change(spec)), folder, kind="native")
        moved = relative_error(logits_of(executor, case.token_ids, max_positions=512), right)
        assert moved > ALLOWED, change.__name__
