"""SchedulingParams: valid values are kept; others are rejected by name, with the allowed range."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from quire.base.errors import InvalidParameter
from quire.base.scheduling_params import MAX_TERM_MS, OBJECTIVES, SchedulingParams
from tests.cases import each_case


@each_case("name", OBJECTIVES)
@each_case(
    "value",
    [0, -1, -0.5, float("nan"), float("inf"), MAX_TERM_MS * 1.001, 10**400, True, "100", [100]],
    ids=lambda value: str(value)[:20],
)
def test_an_absurd_time_is_rejected_by_name_with_the_allowed_range(name: str, value: Any) -> None:
    with pytest.raises(InvalidParameter, match="above 0 to 31536000000") as caught:
        SchedulingParams(**{name: value})
    assert caught.value.param == name
    assert str(caught.value).startswith(f"{name} is ")


@each_case("name", OBJECTIVES)
@each_case("value", [0.001, 5, np.float32(2.5), MAX_TERM_MS])
def test_a_time_within_a_year_is_kept_as_a_float(name: str, value: Any) -> None:
    terms = SchedulingParams(**{name: value})
    assert getattr(terms, name) == float(value)
    assert type(getattr(terms, name)) is float


@pytest.mark.parametrize("value", [1.5, "1", True, None, 1_000_001, -1_000_001])
def test_a_priority_is_a_whole_number_within_a_million(value: Any) -> None:
    with pytest.raises(InvalidParameter, match="from -1000000 to 1000000") as caught:
        SchedulingParams(priority=value)
    assert caught.value.param == "priority"


@pytest.mark.parametrize("value", [None, 5, "x" * 65])
def test_a_tenants_name_is_a_short_text(value: Any) -> None:
    with pytest.raises(InvalidParameter, match="tenant is "):
        SchedulingParams(tenant=value)
