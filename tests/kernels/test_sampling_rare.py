"""Rare sampling steps of both implementations against plain definitions in float64.

The definitions follow the papers and programs named in sampling/rare.py, in the simplest form.
Where rounding decides (a token exactly at a threshold), both results are right.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from quire import _native
from quire.sampling import native, rare, reference
from quire.sampling.batch import SampleBatch, TokenChoice
from tests.drawn import examples
from tests.kernels.rare_cases import make_rare, random_history
from tests.kernels.sampling_cases import make_batch

Choose = Callable[[NDArray[np.float32], SampleBatch], TokenChoice]
Floats = NDArray[np.float64]
NEAR = 2e-4  # nats: minimal distance from a threshold for a token to be judged


@pytest.fixture(params=["reference", "native"])
def choose(request: pytest.FixtureRequest) -> Choose:
    if request.param == "reference":
        return reference.choose
    pool = _native.Pool(2)
    return lambda logits, batch: native.choose(logits, batch, pool)


def drawn(choose: Choose, row: list[float], **given: object) -> set[int]:
    """Return the tokens that 400 seeds choose from one row of logits."""
    temperature = given.pop("temperature", 1.0)
    num = 400
    batch = make_batch(num, temperature=temperature, seeds=range(num), **given)
    return set(choose(np.tile(np.array(row, np.float32), (num, 1)), batch).token_ids.tolist())


def rows() -> Iterator[NDArray[np.float32]]:
    draw = np.random.default_rng(12)
    for _ in range(100):
        size = int(draw.choice([2, 5, 50, 2000]))
        row = (draw.standard_normal(size) * draw.choice([0.1, 1, 4, 15])).astype(np.float32)
        if draw.random() < 0.2:
            row[draw.random(size) < 0.5] = -np.inf
            row[0] = 1.0
        yield row


def in_order(row: NDArray[np.float32]) -> NDArray[np.int32]:
    return np.argsort(-row, kind="stable").astype(np.int32)


def log_probabilities(row: NDArray[np.float32]) -> Floats:
    exact = row.astype(np.float64) - float(row.max())
    return exact - math.log(np.exp(exact).sum())


def entropy(logp: Floats) -> float:
    finite = logp[np.isfinite(logp)]
    return float(-(np.exp(finite) * finite).sum())


def assert_keeps(kept: NDArray[np.int32], wanted: NDArray[np.bool_], margins: Floats) -> None:
    """Check that kept has exactly the wanted ids; those within the margin do not count."""
    got = np.zeros(len(wanted), np.bool_)
    got[kept] = True
    judged = ~(np.abs(margins) < NEAR)
    np.testing.assert_array_equal(got[judged], wanted[judged])


@pytest.mark.parametrize("share", [0.05, 0.3, 0.9, 0.999])
def test_typical_keeps_tokens_nearest_to_the_entropy(share: float) -> None:
    for row in rows():
        logp = log_probabilities(row)
        distance = np.abs(-logp - entropy(logp))
        nearest = np.argsort(distance, kind="stable")
        reached = np.cumsum(np.exp(logp[nearest]))
        if np.abs(reached - share).min() < 1e-5:
            continue
        limit = distance[nearest[np.searchsorted(reached, share)]]
        kept = rare.typical(row, in_order(row), np.float32(share))
        assert_keeps(kept, distance <= limit, np.where(distance == limit, 1.0, distance - limit))


@pytest.mark.parametrize("num_sigmas", [0.3, 1.0, 2.5])
def test_top_n_sigma_keeps_those_within_n_standard_deviations(num_sigmas: float) -> None:
    for row in rows():
        exact = row[np.isfinite(row)].astype(np.float64)
        drop = rare.sigma_drop(row, np.float32(num_sigmas))
        assert drop == pytest.approx(num_sigmas * exact.std(), abs=1e-3, rel=1e-3)


def test_a_masked_logit_is_not_counted_and_one_far_below_counts_as_2048() -> None:
    one = np.float32(1)
    row = np.array([1, 2, 3, 4], np.float32)
    masked = np.append(row, np.float32(-np.inf))
    assert rare.sigma_drop(masked, one) == rare.sigma_drop(row, one)
    far = np.append(row, np.float32(-1e30))
    expected = np.array([1, 2, 3, 4, 4 - 2048.0]).std()
    assert rare.sigma_drop(far, one) == pytest.approx(expected, rel=1e-6)


def test_sums_over_a_row_do_not_depend_on_its_order() -> None:
    draw = np.random.default_rng(4)
    sigma, mirostat = np.float32(1), make_rare(1, mirostat=2).mirostat
    assert mirostat is not None
    for size in (1000, 100_000):
        row = (draw.standard_normal(size) * 4).astype(np.float32)
        row[0] = 20.0
        order = np.concatenate([[0], 1 + draw.permutation(size - 1)])
        ids = np.arange(size, dtype=np.int32)
        assert rare.sigma_drop(row, sigma) == rare.sigma_drop(row[order], sigma)
        one, other = (rare.moved_mu(r, ids, 0, mirostat, 0) for r in (row, row[order]))
        assert one == other
        kept = rare.typical(row, in_order(row), np.float32(0.4))
        again = rare.typical(row[order], in_order(row[order]), np.float32(0.4))
        assert sorted(row[kept].tolist()) == sorted(row[order][again].tolist())


@pytest.mark.parametrize("epsilon", [3e-4, 0.02, 0.4])
def test_epsilon_drops_less_probable_tokens(epsilon: float) -> None:
    for row in rows():
        logp = log_probabilities(row)
        kept = rare.cutoffs(row, in_order(row), np.float32(epsilon), np.float32(0))
        wanted = (logp >= math.log(epsilon)) | (row == row.max())
        assert_keeps(kept, wanted, logp - math.log(epsilon))


@pytest.mark.parametrize("eta", [3e-4, 0.02, 0.4])
def test_eta_drops_less_where_the_entropy_is_high(eta: float) -> None:
    for row in rows():
        logp = log_probabilities(row)
        limit = math.log(min(eta, math.sqrt(eta) * math.exp(-entropy(logp))))
        kept = rare.cutoffs(row, in_order(row), np.float32(0), np.float32(eta))
        assert_keeps(kept, (logp >= limit) | (row == row.max()), logp - limit)


@pytest.mark.parametrize("threshold", [0.001, 0.1, 0.3])
def test_xtc_excludes_all_top_choices_but_the_last(threshold: float) -> None:
    num_excluding = 0
    for row in rows():
        logp = log_probabilities(row)
        if np.abs(logp - math.log(threshold)).min() < NEAR:
            continue
        order = in_order(row)
        above = [id_ for id_ in order.tolist() if logp[id_] >= math.log(threshold)]
        finite = [id_ for id_ in order.tolist() if np.isfinite(row[id_])]
        kept = rare.exclude_top_choices(row, order, np.float32(threshold)).tolist()
        assert kept == finite[max(len(above) - 1, 0) :]
        num_excluding += len(above) > 1
    assert num_excluding > 10


@pytest.mark.parametrize("mu", [-1.0, 0.5, 3.0, 9.0])
def test_mirostat_drops_tokens_with_surprise_above_mu(mu: float) -> None:
    for row in rows():
        bits = -log_probabilities(row) / math.log(2)
        kept = rare.unsurprising(row, in_order(row), np.float32(mu))
        assert_keeps(kept, (bits <= mu) | (row == row.max()), bits - mu)


def test_typical_can_drop_the_most_probable_token(choose: Choose) -> None:
    row = np.log([0.4, *[0.6 / 30] * 30]).tolist()
    assert 0 not in drawn(choose, row, rare={"typical_p": 0.5})
    assert drawn(choose, row, rare={"typical_p": 1.0}) == set(range(31))


def test_typical_keeps_all_ties_and_top_p_sees_the_rest(choose: Choose) -> None:
    row = np.log([0.4, *[0.1] * 6]).tolist()
    assert drawn(choose, row, rare={"typical_p": 0.1}) == set(range(1, 7))
    assert drawn(choose, row, rare={"typical_p": 0.1}, top_p=0.4) == {1, 2, 3}


def test_top_n_sigma_does_not_depend_on_the_temperature(choose: Choose) -> None:
    row = [5.0, 4.5, 4.0, *[0.0] * 20]
    assert drawn(choose, row, rare={"top_n_sigma": 0.8}, temperature=0.5) == {0, 1, 2}
    assert drawn(choose, row, rare={"top_n_sigma": 0.8}, temperature=5.0) == {0, 1, 2}
    assert drawn(choose, [1.0, 1.0, 1.0], rare={"top_n_sigma": 0.5}) == {0, 1, 2}


def test_xtc_acts_after_the_filters(choose: Choose) -> None:
    row = np.log([0.4, 0.3, 0.2, 0.1]).tolist()
    given = {"xtc_probability": 1.0, "xtc_threshold": 0.15}
    assert drawn(choose, row, rare=given) == {2, 3}
    assert drawn(choose, row, rare=given, top_k=2) == {1}
    assert drawn(choose, row, rare={"xtc_probability": 1.0, "xtc_threshold": 0.5}) == {0, 1, 2, 3}
    assert drawn(choose, row, rare={"xtc_probability": 1.0, "xtc_threshold": 0.0}) == {3}
    assert drawn(choose, [0.0, 0.0], rare={"xtc_probability": 1.0, "xtc_threshold": 0.5}) == {1}


@pytest.mark.parametrize("probability", [0.0, 0.1, 0.5, 1.0])
def test_the_xtc_coin_has_its_probability_and_is_independent_of_the_token(
    choose: Choose, probability: float
) -> None:
    num = 6_000 if choose is not reference.choose else examples(6_000)
    row = np.array([3.0, 2.9, -30.0], np.float32)
    given = {"xtc_probability": probability, "xtc_threshold": 0.1}
    batch = make_batch(num, temperature=1.0, seeds=5, positions=range(num), rare=given)
    chosen = choose(np.tile(row, (num, 1)), batch).token_ids
    first = 1 / (1 + math.exp(-0.1)) * (1 - probability)  # the coin leaves only the second
    bound = 4.5 * math.sqrt(num * first * (1 - first)) + 1
    assert abs((chosen == 0).sum() - first * num) < bound
    few = make_batch(200, temperature=1.0, seeds=5, positions=range(200), rare=given)
    again = choose(np.tile(row, (200, 1)), few).token_ids
    np.testing.assert_array_equal(chosen[:200], again)


def dry_penalties(
    history: list[int], multiplier: float, base: float, allowed: int, breakers: set[int]
) -> dict[int, float]:
    """Compute token by token the longest repeat that each would continue."""
    longest: dict[int, int] = {}
    for end in range(len(history) - 1):
        length = 0
        while (
            length < 50
            and length <= end
            and history[end - length] == history[-1 - length]
            and history[end - length] not in breakers
        ):
            length += 1
        following = history[end + 1]
        if following not in breakers:
            longest[following] = max(longest.get(following, 0), length)
    return {
        id_: multiplier * base ** (length - allowed)
        for id_, length in longest.items()
        if length >= allowed
    }


def test_dry_penalties_match_their_definition() -> None:
    draw = np.random.default_rng(3)
    num_penalties = 0
    for _ in range(400):
        history = random_history(draw, 12)
        breakers = set(draw.integers(0, 12, draw.integers(0, 3)).tolist())
        allowed, last_n = int(draw.integers(1, 5)), int(draw.choice([-1, 5, 40]))
        dry = make_rare(
            1,
            dry_multiplier=0.8,
            dry_base=1.2,
            dry_allowed_length=allowed,
            dry_last_n=last_n,
            breakers=[sorted(breakers)],
        ).dry
        assert dry is not None
        values = np.zeros(12, np.float32)
        rare.penalize_repeats(values, np.array(history, np.int32), dry, 0)
        seen = history if last_n < 0 else history[-last_n:]
        wanted = dry_penalties(seen, 0.8, 1.2, allowed, breakers)
        expected = [-wanted.get(id_, 0.0) for id_ in range(12)]
        np.testing.assert_allclose(values, expected, rtol=1e-5)
        num_penalties += len(wanted)
    assert num_penalties > 200


def test_dry_penalizes_a_repeat_but_never_bans(choose: Choose) -> None:
    history = [[1, 2, 3, 9, 1, 2, 3]]
    logits = np.array([[0, 0, 0, 0, 0, 0, 0, 0, 1.0, 2.0]], np.float32)

    def best(**given: object) -> int:
        batch = make_batch(1, history=history, rare={"dry_multiplier": 0.8, **given})
        return int(choose(logits, batch).token_ids[0])

    assert best() == 8  # 2 - 0.8 * 1.75 < 1
    assert best(dry_allowed_length=4) == 9
    assert best(breakers=[[3]]) == 9
    assert best(breakers=[[2]]) == 9
    assert best(breakers=[[9]]) == 9
    assert best(dry_last_n=4) == 9
    assert best(dry_last_n=0) == 9
    only = {"dry_multiplier": 100.0, "dry_base": 100.0, "allowed": [[9]]}
    batch = make_batch(1, history=[[4, 9] * 30 + [4]], rare=only)
    assert choose(logits, batch).token_ids.tolist() == [9]


def test_a_banned_sequence_loses_its_last_token_after_its_prefix(choose: Choose) -> None:
    logits = np.array([[1, 2, 3, 4.0]], np.float32)

    def best(sequences: list[list[int]], history: list[int]) -> int:
        given = {"sequences": [sequences]}
        return int(choose(logits, make_batch(1, history=[history], rare=given)).token_ids[0])

    assert best([[3]], []) == 2
    assert best([[0, 3]], [1, 0]) == 2
    assert best([[0, 3]], [0, 1]) == 3
    assert best([[1, 0, 3]], [0]) == 3  # longer than the history
    assert best([[1, 0, 3], [0, 2]], [1, 0]) == 1
    assert best([[0], [1], [2], [3]], []) == -1


def test_only_allowed_ids_are_chosen(choose: Choose) -> None:
    row = [9.0, 1.0, 8.0, 1.0]
    assert drawn(choose, row, rare={"allowed": [[1, 3]] * 400}) == {1, 3}
    logits = np.array([row, row], np.float32)
    batch = make_batch(2, banned=[[2], [0, 2]], rare={"allowed": [[2, 0, 2], [2]]})
    assert choose(logits, batch).token_ids.tolist() == [0, -1]


def test_no_n_gram_occurs_twice(choose: Choose) -> None:
    logits = np.array([[1, 2, 3, 4.0]], np.float32)

    def best(size: int, history: list[int]) -> int:
        batch = make_batch(1, history=[history], rare={"ngram_size": size})
        return int(choose(logits, batch).token_ids[0])

    assert best(1, [3]) == 2
    assert best(2, [0, 3, 0]) == 2
    assert best(2, [0, 3, 1]) == 3
    assert best(3, [1, 0, 3, 1, 0]) == 2
    assert best(3, [2, 0, 3, 1, 0]) == 3
    assert best(0, [3, 3, 3]) == 3


def kept_in_order(row: NDArray[np.float32], names: list[str], **given: float) -> set[int]:
    """Apply plain definitions one after the other, in float64."""
    values, kept = row.astype(np.float64), np.isfinite(row)
    for name in names:
        logp = np.where(kept, values, -np.inf)
        logp = logp - logp.max()
        logp = logp - math.log(np.exp(logp).sum())
        ranked = np.argsort(-logp, kind="stable")
        ranked = ranked[kept[ranked]]
        chosen = np.zeros(len(row), np.bool_)
        match name:
            case "temperature":
                values = values / given["temperature"]
                continue
            case "top_k":
                chosen[ranked[: int(given["top_k"])]] = True
            case "top_p":
                reached = np.cumsum(np.exp(logp[ranked]))
                chosen[ranked[: np.searchsorted(reached, given["top_p"]) + 1]] = True
            case "min_p":
                chosen = logp >= logp.max() + math.log(given["min_p"])
            case "top_n_sigma":
                chosen = values >= values[kept].max() - given["top_n_sigma"] * values[kept].std()
            case "xtc":
                above = [id_ for id_ in ranked if logp[id_] >= math.log(given["xtc_threshold"])]
                chosen[ranked[max(len(above) - 1, 0) :]] = True
        kept = kept & chosen
    return {int(id_) for id_ in np.flatnonzero(kept)}


ORDERS = [
    ["top_k", "top_p", "min_p", "temperature"],
    ["temperature", "min_p", "top_p", "top_k"],
    ["top_p", "temperature", "top_k", "min_p"],
    ["min_p", "xtc", "top_p", "temperature", "top_n_sigma"],
    ["xtc", "top_n_sigma", "top_p", "top_k"],
]


@pytest.mark.parametrize("order", ORDERS)
def test_steps_apply_in_the_order_of_a_row(choose: Choose, order: list[str]) -> None:
    draw = np.random.default_rng(7)
    given = {"top_k": 7, "top_p": 0.8, "min_p": 0.06, "temperature": 2.5}
    few = {"top_n_sigma": 1.2, "xtc_probability": 1.0, "xtc_threshold": 0.15}
    num_different = 0
    for _ in range(12 if choose is native.choose else examples(12)):
        row = (draw.standard_normal(16) * 1.5).astype(np.float32)
        row[draw.integers(16)] = -np.inf
        wanted = kept_in_order(row, order, **given, **few)
        rare = {"order": [order] * 400, **few}
        assert drawn(choose, row.tolist(), rare=rare, **given) <= wanted
        # All but what has little probability is drawn.
        likely = {id_ for id_ in wanted if row[id_] > row.max() - 3}
        assert likely <= drawn(choose, row.tolist(), rare=rare, **given)
        num_different += wanted != kept_in_order(row, sorted(order), **given, **few)
    assert num_different


def test_a_temperature_of_0_takes_the_largest_of_what_is_left(choose: Choose) -> None:
    row = [3.0, 2.5, 2.5, 0.0]
    rare = {"xtc_probability": 1.0, "xtc_threshold": 0.1}
    for order, token in (
        (["temperature", "xtc"], 0),
        (["xtc", "temperature"], 2),
        (["top_p", "temperature"], 0),
    ):
        given = {**rare, "order": [order] * 400}
        assert drawn(choose, row, rare=given, temperature=0.0) == {token}


def test_a_row_with_an_order_fails_as_others_do(choose: Choose) -> None:
    logits = np.array([[1, np.nan], [1, np.inf], [-np.inf, -np.inf], [3e38, 1], [1, 2]], np.float32)
    rare = {"order": [["top_p", "temperature"]] * 5}
    batch = make_batch(5, temperature=[1, 1, 1, 1e-3, 1e-3], top_p=0.9, rare=rare)
    assert choose(logits, batch).token_ids.tolist() == [-1, -1, -1, -1, 1]


def zipf_count(row: NDArray[np.float32], mu: float) -> float:
    """Return the number of ids that version 1 keeps, before it is rounded down."""
    logp = np.sort(log_probabilities(row))[::-1][:100]
    steps = np.log(np.arange(2, len(logp) + 1) / np.arange(1, len(logp)))
    exponent = (steps * -np.diff(logp)).sum() / (steps * steps).sum()
    above = exponent - 1
    return float((above * 2**mu / (1 - len(row) ** -above)) ** (1 / exponent))


def test_the_first_version_of_mirostat_keeps_as_many_as_its_paper_says() -> None:
    draw = np.random.default_rng(6)
    num_between = 0
    for _ in range(200):
        size = int(draw.choice([3, 50, 500, 5000]))
        spread = draw.choice([0.3, 1.0, 3.0])
        row = (np.log(1 / np.arange(1, size + 1)) * spread).astype(np.float32)
        row = draw.permutation(row + draw.standard_normal(size).astype(np.float32) * 0.1)
        mu = float(draw.choice([0.0, 1.0, 3.0, 6.0, 9.0]))
        exact = min(max(zipf_count(row, mu), 1.0), float(size))
        kept = rare.zipf_top(row, in_order(row), np.float32(mu))
        assert kept.tolist() == in_order(row)[: len(kept)].tolist()
        assert math.floor(exact * 0.999) <= len(kept) <= max(exact * 1.001, 1)
        num_between += 1 < len(kept) < size
    assert num_between > 50


def test_the_first_version_of_mirostat_keeps_one_token_at_least() -> None:
    row = np.full(9, -np.inf, np.float32)
    row[4] = 1.0
    assert rare.zipf_top(row, in_order(row), np.float32(10)).tolist() == [4]
    assert rare.zipf_top(np.ones(1, np.float32), np.zeros(1, np.int32), np.float32(9)).tolist() == [
        0
    ]
    same = np.zeros(50, np.float32)
    assert len(rare.zipf_top(same, in_order(same), np.float32(-20))) == 1
    assert len(rare.zipf_top(same, in_order(same), np.float32(20))) == 50


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("tau", [2.0, 4.0])
def test_mirostat_brings_the_mean_surprise_to_tau(choose: Choose, tau: float, version: int) -> None:
    draw = np.random.default_rng(2)
    num_rows, num_steps = 16 if choose is native.choose else 5, 150
    mus = np.full(num_rows, 2 * tau, np.float32)
    surprises = []
    for step in range(num_steps):
        logits = (draw.standard_normal((num_rows, 400)) * 2).astype(np.float32)
        given = {"mirostat": version, "mirostat_tau": tau, "mirostat_eta": 0.2, "mirostat_mu": mus}
        batch = make_batch(
            num_rows, temperature=1.0, seeds=range(num_rows), positions=step, rare=given
        )
        choice = choose(logits, batch)
        # mu moves by the surprise, so its steps show it.
        surprises.append((mus - choice.mus) / np.float32(0.2) + tau)
        mus = choice.mus
    assert abs(np.mean(surprises[40:]) - tau) < 0.1


def test_rows_without_mirostat_keep_no_mu(choose: Choose) -> None:
    logits = np.zeros((3, 5), np.float32)
    logits[2] = np.nan
    given = {"mirostat": [0, 2, 2], "mirostat_mu": [7, 8, 9]}
    choice = choose(logits, make_batch(3, temperature=1.0, rare=given))
    assert choice.mus[0] == 0.0
    assert choice.mus[1] == pytest.approx(8 - 0.1 * (math.log2(5) - 5), rel=1e-6)
    assert choice.token_ids[2] == -1
    assert len(choose(logits, make_batch(3, rare={})).mus) == 0


def test_inconsistent_shapes_are_rejected(choose: Choose) -> None:
    logits = np.zeros((2, 8), np.float32)
    with pytest.raises(ValueError, match=r"rare\.allowed holds ids from 8 to 8"):
        choose(logits, make_batch(2, rare={"allowed": [[8], []]}))
    with pytest.raises(ValueError, match=r"rare\.dry\.breakers holds ids from -1"):
        choose(logits, make_batch(2, rare={"breakers": [[-1], []]}))
    with pytest.raises(ValueError, match=r"banned_sequences\.tokens holds ids from 1 to 9"):
        choose(logits, make_batch(2, rare={"sequences": [[[1, 9]], []]}))
    with pytest.raises(ValueError, match="a banned sequence has no ids"):
        choose(logits, make_batch(2, rare={"sequences": [[[]], []]}))
    with pytest.raises(ValueError, match=r"dry\.allowed_length must be from 1 to 50"):
        choose(logits, make_batch(2, rare={"dry_allowed_length": 51}))
    with pytest.raises(ValueError, match="typical_p has 1 rows"):
        choose(logits, make_batch(2, rare=make_rare(1, typical_p=0.5)))
