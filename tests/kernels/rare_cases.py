"""RareParameters for the sampling tests: all off except given ones, or all at random."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.sampling.batch import RareParameters

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


def make_rare(num_rows: int, **given: Any) -> RareParameters:
    """Return parameters that are off, except for given ones.

    breakers and allowed are lists of ids, one per row; sequences is a list of id lists per row.
    """
    arrays: dict[str, Any] = {}
    for names, dtype in ((OFF, np.float32), (OFF_COUNTS, np.int32)):
        for name, off in names.items():
            value = np.asarray(given.pop(name, off), dtype)
            arrays[name] = np.broadcast_to(value, num_rows).copy()
    for name, part in (("breakers", "breaker"), ("allowed", "allowed")):
        rows = given.pop(name, [()] * num_rows)
        arrays[f"{part}_starts"] = np.cumsum([0, *map(len, rows)]).astype(np.int32)
        arrays[f"{part}_ids"] = np.array([id_ for row in rows for id_ in row], np.int32)
    rows = given.pop("sequences", [()] * num_rows)
    sequences = [ids for row in rows for ids in row]
    arrays["sequence_rows"] = np.cumsum([0, *map(len, rows)]).astype(np.int32)
    arrays["sequence_starts"] = np.cumsum([0, *map(len, sequences)]).astype(np.int32)
    arrays["sequence_ids"] = np.array([id_ for ids in sequences for id_ in ids], np.int32)
    assert not given, f"unknown: {given}"
    return RareParameters(**arrays)


def random_rare(
    draw: np.random.Generator, num_rows: int, vocabulary: int, histories: list[list[int]]
) -> RareParameters:
    """Draw every parameter, at ordinary and at odd values; mirostat in some rows."""

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

    return make_rare(
        num_rows,
        typical_p=choice(1, 1, 0.9, 0.2, 1e-6, 0.9999999),
        top_n_sigma=choice(0, 0, 1, 0.3, 100),
        epsilon_cutoff=choice(0, 0, 0.01, 3e-4, 1, 1e-40),
        eta_cutoff=choice(0, 0, 0.1, 2e-3, 1),
        xtc_probability=choice(0, 0.5, 1),
        xtc_threshold=choice(0.1, 0.01, 0.5, 0.0, 1, 1e-40),
        dry_multiplier=choice(0, 0.8, 5, 100),
        dry_base=choice(1.75, 1, 100),
        dry_allowed_length=choice(1, 2, 2, 4, 50),
        dry_last_n=choice(-1, -1, 0, 1, 2, 7, 1000),
        ngram_size=choice(0, 0, 0, 1, 2, 3, 50),
        mirostat=choice(0, 0, 2),
        mirostat_tau=choice(5, 0, 3),
        mirostat_eta=choice(0.1, 0, 1),
        mirostat_mu=choice(10, 5, 1, 0, -3, 1e6),
        breakers=ids(3, 0.5),
        allowed=ids(vocabulary + 3 if vocabulary < 2000 else 9, 0.2),
        sequences=[sequences(history) for history in histories],
    )


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


def take_rare(rare: RareParameters, rows: NDArray[np.intp]) -> RareParameters:
    """Return the parameters of these rows, in this order."""
    given: dict[str, Any] = {name: getattr(rare, name)[rows] for name in (*OFF, *OFF_COUNTS)}
    for name, part in (("breakers", "breaker"), ("allowed", "allowed")):
        starts, ids = getattr(rare, f"{part}_starts"), getattr(rare, f"{part}_ids")
        given[name] = [ids[starts[row] : starts[row + 1]].tolist() for row in rows]
    given["sequences"] = [
        [
            rare.sequence_ids[rare.sequence_starts[at] : rare.sequence_starts[at + 1]].tolist()
            for at in range(rare.sequence_rows[row], rare.sequence_rows[row + 1])
        ]
        for row in rows
    ]
    return make_rare(len(rows), **given)
