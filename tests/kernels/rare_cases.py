"""RareParameters for the sampling tests: all off except given ones, or all at random."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.base.sampling_checks import SAMPLERS
from quire.sampling.ordered import order_of
from quire.sampling.parts import (
    BannedSequences,
    Dry,
    Mirostat,
    RaggedIds,
    RareParameters,
    RareTruncation,
)

OFF: dict[str, float] = {
    "typical_p": 1.0,
    "top_n_sigma": 0.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "xtc_probability": 0.0,
    "xtc_threshold": 0.1,
    "dry_multiplier": 0.0,
    "dry_base": 1.75,
    "mirostat_tau": 5.0,
    "mirostat_eta": 0.1,
    "mirostat_mu": 10.0,
}
OFF_COUNTS: dict[str, int] = {
    "dry_allowed_length": 2,
    "dry_last_n": -1,
    "ngram_size": 0,
    "mirostat": 0,
}


# The parts of RareParameters, and the names of their parameters here.
RARE_PARTS: dict[str, tuple[type[Any], dict[str, str]]] = {
    "truncation": (RareTruncation, {name: name for name in list(OFF)[:6]}),
    "dry": (
        Dry,
        {
            "multiplier": "dry_multiplier",
            "base": "dry_base",
            "allowed_length": "dry_allowed_length",
            "last_n": "dry_last_n",
        },
    ),
    "mirostat": (
        Mirostat,
        {"mode": "mirostat", "tau": "mirostat_tau", "eta": "mirostat_eta", "mu": "mirostat_mu"},
    ),
}


def ragged_ids(rows: list[Any], num_rows: int) -> RaggedIds:
    """Lists of ids, one a row."""
    assert len(rows) == num_rows
    starts = np.cumsum([0, *map(len, rows)]).astype(np.int32)
    return RaggedIds(starts, np.array([id_ for row in rows for id_ in row], np.int32))


def make_rare(num_rows: int, **given: Any) -> RareParameters:
    """Off, except for what is given. breakers and allowed are lists of ids, one a row; sequences
    a list of lists of ids, one a row; order a list of names, one a row. A
    part has all of its parameters if one of them is given."""

    def rows(name: str) -> NDArray[Any]:
        off, dtype = (OFF[name], np.float32) if name in OFF else (OFF_COUNTS[name], np.int32)
        return np.broadcast_to(np.asarray(given.pop(name, off), dtype), num_rows).copy()

    parts: dict[str, Any] = {}
    breakers = given.pop("breakers", None)
    for part, (made, names) in RARE_PARTS.items():
        if any(name in given for name in names.values()) or (part == "dry" and breakers):
            arrays: dict[str, Any] = {field: rows(name) for field, name in names.items()}
            if part == "dry":
                arrays["breakers"] = ragged_ids(breakers or [()] * num_rows, num_rows)
            parts[part] = made(**arrays)
    if "ngram_size" in given:
        parts["ngram_size"] = rows("ngram_size")
    if "order" in given:
        orders = given.pop("order")
        parts["order"] = np.array([order_of(names) for names in orders], np.int64)
    if "allowed" in given:
        parts["allowed"] = ragged_ids(given.pop("allowed"), num_rows)
    if "sequences" in given:
        listed = given.pop("sequences")
        sequences = [ids for row in listed for ids in row]
        parts["banned_sequences"] = BannedSequences(
            rows=np.cumsum([0, *map(len, listed)]).astype(np.int32),
            tokens=ragged_ids(sequences, len(sequences)),
        )
    assert not given, f"unknown: {given}"
    return RareParameters(**parts)


def random_rare(
    draw: np.random.Generator, num_rows: int, vocabulary: int, histories: list[list[int]]
) -> RareParameters:
    """Every parameter, at ordinary and at odd values, without some of the parts; mirostat in some
    rows."""

    def choice(*values: float) -> NDArray[Any]:
        return draw.choice(values, num_rows)

    def ids(most: int, share: float) -> list[list[int]]:
        counts = draw.integers(0, most + 1, num_rows) * (draw.random(num_rows) < share)
        return [draw.integers(0, vocabulary, count).tolist() for count in counts]

    def sequences(history: list[int]) -> list[list[int]]:
        listed = []
        for _ in range(draw.integers(0, 4)):
            before = history[len(history) - draw.integers(0, 4) :] if history else []
            if draw.random() < 0.3:
                before = draw.integers(0, vocabulary, draw.integers(0, 50)).tolist()
            listed.append([*before, int(draw.integers(vocabulary))])
        return listed

    given: dict[str, Any] = {
        "typical_p": choice(1, 1, 0.9, 0.2, 1e-6, 0.9999999),
        "top_n_sigma": choice(0, 0, 1, 0.3, 100),
        "epsilon_cutoff": choice(0, 0, 0.01, 3e-4, 1, 1e-40),
        "eta_cutoff": choice(0, 0, 0.1, 2e-3, 1),
        "xtc_probability": choice(0, 0.5, 1),
        "xtc_threshold": choice(0.1, 0.01, 0.5, 0.0, 1, 1e-40),
        "dry_multiplier": choice(0, 0.8, 5, 100),
        "dry_base": choice(1.75, 1, 100),
        "dry_allowed_length": choice(1, 2, 2, 4, 50),
        "dry_last_n": choice(-1, -1, 0, 1, 2, 7, 1000),
        "ngram_size": choice(0, 0, 0, 1, 2, 3, 50),
        "mirostat": choice(0, 0, 1, 2),
        "mirostat_tau": choice(5, 0, 3),
        "mirostat_eta": choice(0.1, 0, 1),
        "mirostat_mu": choice(10, 5, 1, 0, -3, 1e6),
        "order": random_orders(draw, num_rows),
        "breakers": ids(3, 0.5),
        "allowed": ids(vocabulary + 3 if vocabulary < 2000 else 9, 0.2),
        "sequences": [sequences(history) for history in histories],
    }
    for _, names in RARE_PARTS.values():
        if draw.random() < 0.2:
            given = {name: value for name, value in given.items() if name not in names.values()}
    for name in ("ngram_size", "allowed", "sequences", "order"):
        if draw.random() < 0.2:
            del given[name]
    return make_rare(num_rows, **given)


def random_orders(draw: np.random.Generator, num_rows: int) -> list[list[str]]:
    """Draw orders of some of the steps; of half of the rows none."""
    return [
        draw.permutation([*SAMPLERS])[: draw.integers(1, len(SAMPLERS) + 1)].tolist()
        if draw.random() < 0.5
        else []
        for _ in range(num_rows)
    ]


def random_history(draw: np.random.Generator, vocabulary: int) -> list[int]:
    """Draw tokens with repetitions, or none."""
    kind = draw.integers(0, 4)
    if kind == 0:
        return []
    few = draw.integers(0, vocabulary, draw.integers(1, 5))
    if kind == 1:
        return [int(few[0])] * int(draw.integers(1, 120))
    history: list[int] = draw.choice(few, draw.integers(1, 60)).tolist()
    return history * 3 if kind == 2 else history
