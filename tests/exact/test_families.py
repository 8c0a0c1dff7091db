"""Every family of models meets every layout of ranks, with preemption, prefix cache, tiers,
grammars and speculation: what the tables of families.py have, by which the tests of ranks run."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from tests.exact import test_context, test_ranks, test_stages
from tests.exact.families import CASES, FAMILIES, FAMILY, LAYOUTS, MIXTURES
from tests.exact.workload import Case

FEATURES = frozenset({"few blocks", "prefix cache", "tier", "grammar", "drafts"})
RUN = {*test_ranks.LAYOUTS, *test_stages.LAYOUTS, *test_context.LAYOUTS}


def case_of(layout: str, number: int) -> Case:
    """Return a case as the test of a layout draws it."""
    if layout.startswith("CP"):
        return test_context.long_case(number, 1, 2, 1)
    if "PP" in layout:
        return test_stages.case_for_stages(number, 1, 2)
    return test_ranks.case_for_ranks(number, 1)


def features_of(case: Case) -> set[str]:
    """Return what a case draws, of FEATURES."""
    settings, requests = case.settings, case.requests
    blocks = sum(-(-one.max_total_tokens // settings.block_size) for one in requests)
    has = {
        "few blocks": settings.num_blocks < blocks,  # so that requests are preempted
        "prefix cache": settings.prefix_caching,
        "tier": settings.tier_blocks > 0,
        "grammar": any(one.sampling.structured_outputs for one in requests),
        "drafts": bool(settings.proposer),
    }
    return {name for name, is_drawn in has.items() if is_drawn}


def features(cases: Iterable[tuple[str, int]]) -> set[str]:
    """Return what the cases draw together. cases: layouts and numbers."""
    return set().union(*(features_of(case_of(*one)) for one in cases))


def test_every_layout_of_the_table_is_run() -> None:
    assert set(CASES) == RUN
    assert set(LAYOUTS) <= RUN


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_family_meets_the_layout_and_the_layout_every_feature(layout: str) -> None:
    met = {FAMILY[name] for name, _ in CASES[layout]}
    assert met == (MIXTURES if layout.startswith("EP") else FAMILIES)
    assert features((layout, number) for _, number in CASES[layout]) == FEATURES


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_family_meets_every_feature(family: str) -> None:
    cases = [
        (layout, number)
        for layout, runs in CASES.items()
        for name, number in runs
        if FAMILY[name] == family
    ]
    assert features(cases) == FEATURES
