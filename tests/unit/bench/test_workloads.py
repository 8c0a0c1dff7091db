"""Workloads: fixed lengths, fresh tokens, shared prefixes."""

from __future__ import annotations

import numpy as np
import pytest

from quire.base.errors import SettingError
from quire.bench.workloads import (
    WORKLOADS,
    Range,
    RequestSpec,
    batches,
    draw_ids,
    fit_lengths,
    mixed_lengths,
)
from tests.cases import each_case


def test_the_workloads_are_the_documented_ones() -> None:
    assert [(len(w.lengths), w.max_running) for w in WORKLOADS.values()] == [
        (1, 1),
        (1, 1),
        (32, 16),
        (16, 16),
    ]
    w1, w2, w3, w4 = WORKLOADS.values()
    assert (w1.prompt_tokens, w1.output_tokens) == (128, 128)
    assert (w2.prompt_tokens, w2.output_tokens) == (2048, 1)
    assert all(128 <= one.prompt <= 512 and 32 <= one.output <= 128 for one in w3.lengths)
    assert (w3.prompt_tokens, w3.output_tokens) == (11_025, 2_530)
    assert all((one.prompt, one.shared, one.output) == (1056, 1024, 32) for one in w4.lengths)


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_draw_has_the_lengths_and_new_tokens_each_time(name: str) -> None:
    workload, rng = WORKLOADS[name], np.random.default_rng(1)
    first, second = workload.draw(151_936, rng), workload.draw(151_936, rng)
    for asks in (first, second):
        assert [len(ask.prompt_ids) for ask in asks] == [one.prompt for one in workload.lengths]
        assert [ask.output_tokens for ask in asks] == [one.output for one in workload.lengths]
        assert all(300 <= id_ < 151_936 for ask in asks for id_ in ask.prompt_ids)
    assert all(a.prompt_ids[:16] != b.prompt_ids[:16] for a, b in zip(first, second, strict=True))


def test_only_the_shared_prefix_is_shared() -> None:
    asks = WORKLOADS["w4"].draw(50_000, np.random.default_rng(2))
    assert len({ask.prompt_ids[:1024] for ask in asks}) == 1
    assert len({ask.prompt_ids[1024:] for ask in asks}) == 16


def test_small_vocabularies_are_used_and_tiny_ones_rejected() -> None:
    rng = np.random.default_rng(0)
    assert draw_ids(50, 512, rng).min() >= 3
    with pytest.raises(SettingError, match="3 tokens"):
        draw_ids(1, 3, rng)


def test_mixed_lengths_reach_both_ends_and_stay_the_same() -> None:
    lengths = mixed_lengths(400, (4, 6), (1, 2), seed=9)
    assert {one.prompt for one in lengths} == {4, 5, 6}
    assert {one.output for one in lengths} == {1, 2}
    assert lengths == mixed_lengths(400, (4, 6), (1, 2), seed=9)


def test_static_groups_run_to_their_longest_answer() -> None:
    asks = [RequestSpec(prompt_ids=(5,), output_tokens=count) for count in (3, 9, 4, 1, 2)]
    groups = batches(asks, 2)
    assert [[ask.output_tokens for ask in group] for group in groups] == [[9, 9], [4, 4], [2]]


@each_case(
    ("context", "prompts", "outputs", "found"),
    [
        (None, None, None, ((128, 512), (32, 128))),
        (640, None, None, ((128, 512), (32, 128))),
        (512, None, None, ((102, 409), (25, 102))),
        (2, None, None, ((1, 1), (1, 1))),
        (512, (1, 500), None, ((1, 500), (3, 12))),
        (512, None, (5, 12), ((125, 500), (5, 12))),
        (512, (400, 500), (5, 12), ((400, 500), (5, 12))),
        (None, (900, 950), (5, 12), ((900, 950), (5, 12))),
        (None, (900, 950), None, ((900, 950), (32, 128))),
    ],
)
def test_usual_lengths_are_cut_to_the_context(
    context: int | None, prompts: Range | None, outputs: Range | None, found: tuple[Range, Range]
) -> None:
    assert fit_lengths(context, prompts, outputs) == found


@pytest.mark.parametrize(
    ("prompts", "outputs"), [((1, 512), None), (None, (9, 512)), ((500, 500), (13, 13))]
)
def test_requested_lengths_are_never_cut(prompts: Range | None, outputs: Range | None) -> None:
    with pytest.raises(SettingError, match=r"--prompts.*--max-model-len"):
        fit_lengths(512, prompts, outputs)
