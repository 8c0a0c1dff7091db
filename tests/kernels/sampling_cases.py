"""Batches for the sampling tests: plain defaults, or everything at random."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.sampling.batch import SampleBatch, TokenChoice
from tests.kernels.rare_cases import make_rare, random_history, random_rare, take_rare

PARTS = ("token_ids", "logprobs", "top_ids", "top_logprobs", "mus")
NO_INTS = np.empty(0, np.int32)


def make_batch(num_rows: int, **given: Any) -> SampleBatch:
    """Return greedy rows without edits or log-probabilities, except for given parameters.

    A number applies to all rows. history, bias (pairs) and banned are lists, one per row; rare
    holds the arguments of make_rare.
    """
    rare = given.pop("rare", None)
    fields: dict[str, Any] = {
        name: given.pop(name) for name in ("mask_rows", "masks", "num_candidates") if name in given
    }
    defaults = {
        "temperature": 0.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "seeds": 0,
        "streams": 0,
        "positions": 0,
        "num_prompt_tokens": 0,
        "num_logprobs": -1,
    }
    for name, default in defaults.items():
        dtype = np.int64 if name == "seeds" else (type(default) is int and np.int32) or np.float32
        value = np.asarray(given.pop(name, default), dtype)
        fields[name] = np.broadcast_to(value, num_rows).copy()
    for name in ("history", "bias", "banned"):
        rows = given.pop(name, [()] * num_rows)
        assert len(rows) == num_rows
        fields[f"{name}_starts"] = np.cumsum([0, *map(len, rows)]).astype(np.int32)
        flat = [entry for row in rows for entry in row]
        if name == "bias":
            fields["bias_ids"] = np.array([token_id for token_id, _ in flat], np.int32)
            fields["bias_values"] = np.array([value for _, value in flat], np.float32)
        else:
            fields["history" if name == "history" else "banned_ids"] = np.array(flat, np.int32)
    assert not given, f"unknown: {given}"
    if rare is not None:
        fields["rare"] = make_rare(num_rows, **rare) if isinstance(rare, dict) else rare
    return SampleBatch(**fields)


def random_batch(
    draw: np.random.Generator, num_rows: int, vocabulary: int, *, rarely: bool = False
) -> SampleBatch:
    """Draw every parameter, at ordinary and at odd values; with `rarely` also RareParameters."""

    def ids(most: int) -> list[list[int]]:
        counts = draw.integers(0, most + 1, num_rows) * draw.integers(0, 2, num_rows)
        return [draw.integers(0, vocabulary, count).tolist() for count in counts]

    def choice(*values: float) -> NDArray[Any]:
        return draw.choice(values, num_rows)

    history = ids(40)
    if rarely:
        history = [random_history(draw, vocabulary) for _ in range(num_rows)]
    prompts = [int(draw.integers(0, len(row) + 1)) for row in history]
    return make_batch(
        num_rows,
        temperature=choice(0, 1e-13, 1e-3, 0.5, 1, 1, 2),
        top_k=choice(0, 0, 1, 2, 5, 50, vocabulary, vocabulary + 5),
        top_p=choice(1, 1, 0.9, 0.5, 0.99, 1e-6, 0.999999),
        min_p=choice(0, 0, 0.1, 1, 1e-5, 1e-40),
        repetition_penalty=choice(1, 1, 1.3, 0.5),
        presence_penalty=choice(0, 0, 1.5, -2),
        frequency_penalty=choice(0, 0, 0.3),
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
    """Return the batch of these rows, in this order."""
    fields: dict[str, Any] = {}
    for name in SampleBatch.__slots__:
        values = getattr(batch, name)
        if name in ("history", "bias_ids", "bias_values", "banned_ids", "prepared"):
            continue
        if name == "rare":
            fields[name] = None if values is None else take_rare(values, rows)
            continue
        if name in ("mask_rows", "masks", "num_candidates", "late_slots"):
            fields[name] = values[rows] if name != "masks" and len(values) else values
            continue
        if not name.endswith("_starts"):
            fields[name] = values[rows]
            continue
        pieces = [slice(values[row], values[row + 1]) for row in rows]
        sizes = [piece.stop - piece.start for piece in pieces]
        fields[name] = np.cumsum([0, *sizes]).astype(np.int32)
        flat = {"history_starts": ("history",), "banned_starts": ("banned_ids",)}
        for part in flat.get(name, ("bias_ids", "bias_values")):
            whole = getattr(batch, part)
            fields[part] = np.concatenate([whole[:0], *(whole[piece] for piece in pieces)])
    return SampleBatch(**fields)


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
