"""Batches for the sampling tests: plain defaults, or everything at random."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.sampling.batch import SampleBatch, TokenChoice
from quire.sampling.parts import (
    WHOLE,
    BannedSequences,
    LogitBias,
    NoiseKeys,
    Penalties,
    TokenHistory,
    TokenMasks,
    Truncation,
)
from tests.kernels.rare_cases import make_rare, ragged_ids, random_history, random_rare

PARTS = ("token_ids", "logprobs", "top_ids", "top_logprobs", "mus")
# Parameters of parts that a batch may lack.
PARTS_OF_BATCHES = (
    ("top_k", "top_p", "min_p"),
    ("repetition_penalty", "presence_penalty", "frequency_penalty", "last_n"),
    ("last_n",),
    ("history", "num_prompt_tokens"),
    ("bias",),
    ("banned",),
    ("num_logprobs",),
)


def make_batch(num_rows: int, **given: Any) -> SampleBatch:
    """Return greedy rows without edits or log-probabilities, except for given parameters.

    A number stands for all rows. history, bias (pairs) and banned are lists, one a row; rare
    holds what make_rare takes. A part has all of its parameters if one of them is given.
    """

    def rows(name: str, off: float, dtype: type[Any]) -> NDArray[Any]:
        return np.broadcast_to(np.asarray(given.pop(name, off), dtype), num_rows).copy()

    def has(*names: str) -> bool:
        return any(name in given for name in names)

    parts: dict[str, Any] = {
        "positions": rows("positions", 0, np.int32),
        "temperature": rows("temperature", 0.0, np.float32),
        "noise": NoiseKeys(seeds=rows("seeds", 0, np.int64), streams=rows("streams", 0, np.int32)),
    }
    if has("top_k", "top_p", "min_p"):
        parts["truncation"] = Truncation(
            top_k=rows("top_k", 0, np.int32),
            top_p=rows("top_p", 1.0, np.float32),
            min_p=rows("min_p", 0.0, np.float32),
        )
    if has("repetition_penalty", "presence_penalty", "frequency_penalty"):
        parts["penalties"] = Penalties(
            repetition=rows("repetition_penalty", 1.0, np.float32),
            presence=rows("presence_penalty", 0.0, np.float32),
            frequency=rows("frequency_penalty", 0.0, np.float32),
            last_n=rows("last_n", WHOLE, np.int32) if has("last_n") else None,
        )
    if has("history"):
        parts["history"] = TokenHistory(
            tokens=ragged_ids(given.pop("history"), num_rows),
            num_prompt_tokens=rows("num_prompt_tokens", 0, np.int32),
        )
    given.pop("num_prompt_tokens", None)
    if has("bias"):
        bias = given.pop("bias")
        parts["logit_bias"] = LogitBias(
            tokens=ragged_ids([[token_id for token_id, _ in row] for row in bias], num_rows),
            values=np.array([value for row in bias for _, value in row], np.float32),
        )
    if has("banned"):
        parts["banned"] = ragged_ids(given.pop("banned"), num_rows)
    if has("mask_rows"):
        parts["masks"] = TokenMasks(rows=given.pop("mask_rows"), words=given.pop("masks"))
    for name in ("num_logprobs", "num_candidates"):
        if has(name):
            parts[name] = rows(name, 0, np.int32)
    rare = given.pop("rare", None)
    assert not given, f"unknown: {given}"
    parts["rare"] = make_rare(num_rows, **rare) if isinstance(rare, dict) else rare
    return SampleBatch(**parts)


def random_batch(
    draw: np.random.Generator, num_rows: int, vocabulary: int, *, rarely: bool = False
) -> SampleBatch:
    """Every parameter, at ordinary and at odd values, without some of the parts; rarely:
    RareParameters too."""

    def ids(most: int) -> list[list[int]]:
        counts = draw.integers(0, most + 1, num_rows) * draw.integers(0, 2, num_rows)
        return [draw.integers(0, vocabulary, count).tolist() for count in counts]

    def choice(*values: float) -> NDArray[Any]:
        return draw.choice(values, num_rows)

    history = ids(40)
    if rarely:
        history = [random_history(draw, vocabulary) for _ in range(num_rows)]
    prompts = [int(draw.integers(0, len(row) + 1)) for row in history]
    given: dict[str, Any] = dict(
        temperature=choice(0, 1e-13, 1e-3, 0.5, 1, 1, 2),
        top_k=choice(0, 0, 1, 2, 5, 50, vocabulary, vocabulary + 5),
        top_p=choice(1, 1, 0.9, 0.5, 0.99, 1e-6, 0.999999),
        min_p=choice(0, 0, 0.1, 1, 1e-5, 1e-40),
        repetition_penalty=choice(1, 1, 1.3, 0.5),
        presence_penalty=choice(0, 0, 1.5, -2),
        frequency_penalty=choice(0, 0, 0.3),
        last_n=choice(WHOLE, WHOLE, -1, 0, 1, 3, 20, 1000).astype(np.int32),
        seeds=draw.integers(-(2**63), 2**63 - 1, num_rows),
        streams=draw.integers(0, 4, num_rows),
        positions=draw.integers(0, 100_000, num_rows),
        num_prompt_tokens=prompts,
        num_logprobs=choice(-1, 0, 3, 20),
        history=history,
        bias=[[(token_id, draw.normal(0, 5)) for token_id in row] for row in ids(4)],
        banned=ids(3),
        rare=random_rare(draw, num_rows, vocabulary, history) if rarely else None,
        **random_masks(draw, num_rows, vocabulary),
        **random_beams(draw, num_rows),
    )
    for names in PARTS_OF_BATCHES:
        if draw.random() < 0.2:
            given = {name: value for name, value in given.items() if name not in names}
    return make_batch(num_rows, **given)


def random_masks(
    draw: np.random.Generator, num_rows: int, vocabulary: int
) -> dict[str, NDArray[Any]]:
    """Draw masks for some rows of some batches: dense, thin and empty ones, sometimes with bits
    past the vocabulary.
    """
    if draw.random() < 0.5:
        return {}
    words = -(-vocabulary // 32)
    masks = draw.integers(0, 2**32, (3, words), dtype=np.uint32)
    masks[1] &= draw.integers(0, 2**32, words, dtype=np.uint32) & np.uint32(0x01010101)
    masks[2] = draw.choice([0, 0xFFFFFFFF])
    return {"mask_rows": draw.integers(-1, 3, num_rows).astype(np.int32), "masks": masks}


def random_beams(draw: np.random.Generator, num_rows: int) -> dict[str, NDArray[Any]]:
    """Mark some rows of some batches as beams."""
    if draw.random() < 0.5:
        return {}
    return {"num_candidates": draw.choice([0, 0, 1, 4, 70], num_rows).astype(np.int32)}


def random_logits(draw: np.random.Generator, num_rows: int, vocabulary: int) -> NDArray[np.float32]:
    """Draw rows of any spread, with ties, gaps, zeros of both signs and failures."""
    spread = draw.choice([0.0, 0.01, 1.0, 4.0, 30.0], (num_rows, 1))
    logits = (draw.standard_normal((num_rows, vocabulary)) * spread).astype(np.float32)
    for row in logits:
        match draw.integers(0, 10):
            case 0:
                row[:] = np.round(row)
            case 1:
                row[draw.random(vocabulary) < 0.5] = -np.inf
            case 2:
                row[draw.integers(vocabulary)] = draw.choice([np.nan, np.inf])
            case 3:
                row[:] = -np.inf
            case 4:
                row *= np.float32(-0.0)
            case 5:  # like a bf16 head: many ties
                row[:] = (row.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    return logits


def take_rows(batch: SampleBatch, rows: NDArray[np.intp]) -> SampleBatch:
    """The batch of these rows, in this order: joined from one batch for each row."""
    return joined([batch.take(np.array([row])) for row in rows])


def joined(parts: list[Any]) -> Any:
    """Parts of batches, one below the other."""
    first = parts[0]
    if first is None:
        return None
    if isinstance(first, np.ndarray):
        return np.concatenate(parts)
    if isinstance(first, TokenMasks):
        return TokenMasks(rows=joined([part.rows for part in parts]), words=first.words)
    taken = {}
    for name in (item.name for item in fields(first) if item.init):
        values = [getattr(part, name) for part in parts]
        if name == "starts" or (name == "rows" and isinstance(first, BannedSequences)):
            lengths = np.concatenate([np.diff(value) for value in values])
            taken[name] = np.cumsum([0, *lengths]).astype(np.int32)
        else:
            taken[name] = joined(values)
    return type(first)(**taken)


def assert_same_choice(actual: TokenChoice, expected: TokenChoice) -> None:
    """Compare all parts bit for bit."""
    for name in PARTS:
        one, other = getattr(actual, name), getattr(expected, name)
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other, err_msg=name)
    assert (actual.candidates is None) == (expected.candidates is None)
    if actual.candidates is not None and expected.candidates is not None:
        for name in ("ids", "scores", "logprobs"):
            one, other = getattr(actual.candidates, name), getattr(expected.candidates, name)
            np.testing.assert_array_equal(one, other, err_msg=name, strict=True)
