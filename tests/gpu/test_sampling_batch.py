"""Sampling and scores on a device match the reference bit for bit for all parameters."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from quire.execute.gpu import choice
from quire.execute.gpu.kernels import edit_logits as edit_kernels
from quire.execute.gpu.kernels.device_params import rows_for_the_host
from quire.execute.gpu.kernels.edit_logits import Edits, add_late_tokens, edit_logits
from quire.sampling import reference, scoring
from quire.sampling.batch import SampleBatch
from quire.sampling.parts import WHOLE
from quire.sampling.scoring import ScoreBatch
from tests.kernels.sampling_cases import (
    assert_same_choice,
    make_batch,
    random_batch,
    random_logits,
    take_rows,
)

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::RuntimeWarning")]
Float32s = NDArray[np.float32]


def never(logits: Float32s, batch: SampleBatch) -> reference.TokenChoice:
    """Fail: the host must not be called."""
    raise AssertionError("these rows are for the device")


@pytest.mark.parametrize("seed", range(6))
def test_random_parameters_match_the_reference(seed: int) -> None:
    rng = np.random.default_rng(seed)
    vocabulary = int(rng.choice([33, 1100]))
    batch = random_batch(rng, 6, vocabulary, rarely=seed % 2 == 1)
    logits = random_logits(rng, 6, vocabulary)
    found = choice.choose(torch.from_numpy(logits), batch, reference.choose)
    assert_same_choice(found, reference.choose(logits, batch))


def test_penalties_bias_bans_and_masks_run_on_the_device() -> None:
    rng = np.random.default_rng(10)
    logits = rng.standard_normal((4, 1100)).astype(np.float32)
    masks = rng.integers(0, 2**32, (1, 35), dtype=np.uint32)
    batch = make_batch(
        4,
        temperature=[0.0, 1.0, 0.8, 1.0],
        top_k=[0, 0, 50, 3],
        repetition_penalty=1.3,
        frequency_penalty=[0.3, 0.0, 0.3, 0.0],
        presence_penalty=[0.0, -1.5, 0.2, 0.0],
        num_prompt_tokens=[2, 0, 1, 3],
        num_logprobs=[-1, 0, 5, 20],
        history=[[1, 5, 5, 1090], [7, 7, 7], [1099], [3, 4, 5]],
        bias=[[(9, 4.0), (1090, 2.5)], [], [(3, -100.0)], [(5, 30.0)]],
        banned=[[int(logits[0].argmax())], [1], [], [5]],
        mask_rows=np.array([-1, 0, 0, -1], np.int32),
        masks=masks,
    )
    found = choice.choose(torch.from_numpy(logits), batch, never)
    assert_same_choice(found, reference.choose(logits, batch))


def late_batch(
    rng: np.random.Generator, vocabulary: int, **more: Any
) -> tuple[SampleBatch, NDArray[np.int32]]:
    """Return rows that lack their last token, except one, and the last token of each of ten slots.

    The last tokens are: in the row's prompt, in its output, biased, banned, new, and of a failed
    row. The longest history takes several iterations.
    """
    long = rng.integers(20, vocabulary, 3000).tolist()
    batch = make_batch(
        7,
        temperature=[0.0, 1.0, 0.8, 1.0, 0.0, 1.0, 0.9],
        repetition_penalty=[1.3, 1.0, 2.0, 1.2, 1.1, 1.5, 1.2],
        frequency_penalty=[0.3, 0.5, 0.0, -0.4, 0.2, 0.3, 0.0],
        presence_penalty=[0.0, -1.5, 0.2, 0.0, 0.1, 0.4, 0.7],
        num_prompt_tokens=[2, 0, 1, 3, 2, 1, 3000],
        num_logprobs=[-1, 0, 5, 20, -1, 2, 3],
        history=[[1, 5, 5, 9], [7, 7, 7], [8], [3, 4, 5], [6, 2], [4, 4], long],
        bias=[[(9, -4.0)], [], [(3, -100.0)], [(5, 30.0)], [], [], []],
        banned=[[], [1], [], [5], [], [], []],
        **more,
    )
    slots = np.array([9, 0, 4, 3, -1, 6, 1], np.int32)
    last = np.full(10, -7, np.int32)
    last[slots[[0, 1, 2, 3, 5, 6]]] = [1, 7, 3, 11, -1, long[2500]]
    assert batch.history is not None
    return replace(batch, history=replace(batch.history, late_slots=slots)), last


@pytest.mark.parametrize("more", [{}, {"last_n": [2, -1, 1, WHOLE, 3, 4, 50]}])
def test_a_last_token_only_on_the_device_is_counted(more: dict[str, Any]) -> None:
    rng, vocabulary = np.random.default_rng(14), 5000
    batch, last = late_batch(rng, vocabulary, **more)
    logits = rng.standard_normal((7, vocabulary)).astype(np.float32)
    # The most likely token of a greedy row, unless the penalty of this last token changes it.
    logits[0, last[9]] = np.float32(1.3) * (logits[0].max() + np.float32(0.1))
    known = batch.completed(last)
    assert known.history is not None
    history = known.history.tokens
    assert history.starts.tolist() == [0, 5, 9, 11, 15, 17, 19, 3020]
    assert history.ids[:5].tolist() == [1, 5, 5, 9, 1]
    assert history.ids[-1] == last[1]
    tensor = torch.from_numpy(logits.copy())
    kept: list[list[int]] = []
    found = choice.choose_later(
        tensor,
        batch,
        choice.CPU_STREAM,
        last=torch.from_numpy(last),
        keep=lambda ids: kept.append(ids.tolist()),
    ).wait()
    expected = reference.choose(logits, known)
    assert_same_choice(found, expected)
    assert kept == [expected.token_ids.tolist()]
    assert batch.history is not None
    complete = replace(batch.history, late_slots=None)
    without = reference.choose(logits, replace(batch, history=complete))
    assert without.token_ids[0] == last[9] != expected.token_ids[0]
    edited = []
    for given in (batch, known):
        edits, of_these = Edits.of(given), tensor.clone()
        assert edits is not None
        add_late_tokens(edits, torch.from_numpy(last))
        edit_logits(of_these, edits)
        edited.append(of_these)
    assert torch.equal(*edited)
    changed = (edited[0] != tensor).sum(dim=1).tolist()
    few = [2, 2, 1, 4, 2, 1, len(set(history.ids[-50:].tolist()))]
    all_named = [3, 2, 2, 4, 2, 1, len(set(history.ids[19:].tolist()))]
    assert changed == (few if more else all_named)


def test_only_rows_with_logit_edits_call_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each host call takes microseconds in every step."""
    looked_at, look = [], edit_kernels._row_entries
    monkeypatch.setattr(
        edit_kernels,
        "_row_entries",
        lambda batch, row: (looked_at.append(row), look(batch, row))[1],
    )
    assert Edits.of(make_batch(200, temperature=1.0, history=[[1, 2]] * 200)) is None
    some = {
        "repetition_penalty": [1.0, 1.5, 1.0, 1.0, 1.0, 1.5],
        "history": [[4], [4], [], [4], [], []],
        "bias": [[], [], [(3, 1.0)], [], [], []],
        "banned": [[], [], [], [], [5], []],
    }
    edits = Edits.of(make_batch(6, **some))
    assert edits is not None
    assert edits.entries[:2].tolist() == [[1, 2, 4], [4, 3, 5]]
    assert looked_at == [1, 2, 4]


def test_a_history_without_its_last_token_is_not_sampled_from() -> None:
    batch, _ = late_batch(np.random.default_rng(15), 4000)
    logits = np.zeros((7, 4000), np.float32)
    for choose in (
        reference.choose,
        lambda *given: choice.choose(torch.zeros(7, 4000), batch, never),
    ):
        with pytest.raises(ValueError, match="last tokens are late"):
            choose(logits, batch)


def test_only_rows_that_need_it_are_sampled_on_the_host() -> None:
    rng = np.random.default_rng(11)
    logits = rng.standard_normal((5, 40)).astype(np.float32)
    bias = [[], [(3, 1.0), (3, 2.0)], [], [(3, 1.0), (4, 2.0)], []]
    rare = {"typical_p": [1.0, 1.0, 1.0, 1.0, 0.5], "allowed": [[], [], [1, 2], [], []]}
    batch = make_batch(5, temperature=1.0, bias=bias, rare=rare)
    assert rows_for_the_host(batch).tolist() == [False, True, True, False, True]
    asked = []

    def on_host(rows: Float32s, part: SampleBatch) -> reference.TokenChoice:
        asked.append(rows)
        return reference.choose(rows, part)

    found = choice.choose(torch.from_numpy(logits), batch, on_host)
    assert_same_choice(found, reference.choose(logits, batch))
    assert len(asked) == 1
    assert (asked[0] == logits[[1, 2, 4]]).all()


def test_rows_of_a_batch_keep_all_their_fields() -> None:
    rng = np.random.default_rng(12)
    batch, rows = random_batch(rng, 6, 50, rarely=True), np.array([4, 1])
    logits = random_logits(rng, 6, 50)
    found = reference.choose(logits[rows], batch.take(rows))
    assert_same_choice(found, reference.choose(logits[rows], take_rows(batch, rows)))


@pytest.mark.parametrize("vocabulary", [7, 2100])
def test_scores_match_the_reference(vocabulary: int) -> None:
    rng = np.random.default_rng(13)
    logits = rng.standard_normal((7, vocabulary)).astype(np.float32)
    logits[0] = np.round(logits[0])
    logits[1, 3], logits[2, 5], logits[3] = np.nan, np.inf, -np.inf
    logits[4, 2:] = -np.inf
    batch = ScoreBatch(
        targets=np.array([vocabulary - 1, 0, 1, 2, 6, -1, 3], np.int32),
        num_top=np.array([20, 3, 2, 1, 5, 4, 0], np.int32),
        listed_starts=np.array([0, 3, 3, 4, 4, 6, 6, 7], np.int32),
        listed_ids=np.array([0, 5, 1, 2, 6, 0, 4], np.int32),
    )
    found, expected = choice.score(torch.from_numpy(logits), batch), scoring.score(logits, batch)
    for name in ("logprobs", "ranks", "top_ids", "top_logprobs", "listed_logprobs"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name), name)
