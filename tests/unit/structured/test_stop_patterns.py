"""Stop patterns: the first end of a match, in any pieces; refusals; bounded work."""

from __future__ import annotations

import re
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.base.errors import InvalidParameter
from quire.base.sampling_params import SamplingParams
from quire.engine.output.stop_conditions import PatternStops, stops_of
from quire.structured.stop_patterns import PatternFailed, StopPatterns, check_patterns
from quire.text.stops import StopStrings
from tests.cases import each_case

PATTERNS = ("ab+c", "[a-c]{3}", "a|bb", "é.", r"c\sb", "(ab)*c", "[^a]b", "a.c")
LETTERS = st.text(alphabet="abcé ", max_size=24)


def first_end(pattern: str, text: str) -> int | None:
    """Return where the first match of a pattern ends first, by Python's own engine."""
    compiled = re.compile(pattern)
    for end in range(1, len(text) + 1):
        if any(compiled.fullmatch(text, start, end) for start in range(end)):
            return end
    return None


@settings(deadline=None)
@given(st.sampled_from(PATTERNS), LETTERS, st.lists(st.integers(0, 24), max_size=3))
def test_a_match_is_found_at_its_first_end_in_any_pieces(
    pattern: str, text: str, cuts: list[int]
) -> None:
    patterns, at = StopPatterns([pattern]), 0
    for cut in [*sorted(min(cut, len(text)) for cut in cuts), len(text)]:
        found = patterns.push(text[at:cut])
        if found is not None:
            assert found[1] == pattern
            assert at + found[0] == first_end(pattern, text)
            return
        at = cut
    assert first_end(pattern, text) is None


def test_of_several_patterns_the_one_that_ends_first_counts() -> None:
    assert StopPatterns(["cd", "b.d", "bc"]).push("abcd") == (3, "bc")


def test_a_match_before_it_is_armed_ends_nothing() -> None:
    patterns = StopPatterns(["b"])
    assert patterns.push("ab", armed=False) is None
    assert patterns.push("aab") == (3, "b")


def test_a_copy_is_independent() -> None:
    patterns = StopPatterns(["ab"])
    patterns.push("a")
    twin = patterns.copy()
    assert patterns.push("c") is None
    assert twin.push("b") == (1, "ab")


@each_case(
    "pattern",
    [
        *("(?=a)b", r"(a)\1", "^a", "a$", r"\ba", r"a\Z", "(a", "a)|(b", "[a", "a{2,1}", "*a"),
        *("a*", "(a|)", "()"),
    ],
)
def test_a_pattern_that_is_not_supported_is_refused(pattern: str) -> None:
    with pytest.raises(InvalidParameter, match="stop_regex") as refused:
        check_patterns([pattern])
    assert refused.value.param == "stop_regex"


@pytest.mark.parametrize("pattern", [r"[$^]a", r"\$a", r"a\\b", "[^b]a", r"[\]^]a"])
def test_marks_of_anchors_may_be_literal(pattern: str) -> None:
    check_patterns([pattern])


@pytest.mark.parametrize("pattern", ["(a*)*b", "(a|a)*b", "(a|aa)+b", "(.*a){12}b"])
def test_patterns_that_backtrack_elsewhere_are_linear(pattern: str) -> None:
    patterns = StopPatterns([pattern])
    assert patterns.push("a" * 20_000) is None
    assert patterns.push("b") == (1, pattern)


def test_a_pattern_of_too_many_states_ends_by_an_error_not_by_time() -> None:
    patterns, random = StopPatterns(["(.{1,200}x){5}y"]), Random(1)
    text = "".join(random.choice("ab x1") for _ in range(20_000))
    with pytest.raises(PatternFailed, match="too many states"):
        patterns.push(text)


def stops(**fields: object) -> StopStrings:
    return stops_of(SamplingParams(**fields))  # type: ignore[arg-type]


def test_what_a_pattern_matches_stays_and_a_string_is_cut_off() -> None:
    both: dict[str, object] = {"stop": ("END",), "stop_regex": ("[0-9]{2}",)}
    by_pattern = stops(**both)
    assert by_pattern.push("a1E") == "a1"
    assert by_pattern.push("N22x") == "EN22"
    assert by_pattern.matched == "[0-9]{2}"
    assert by_pattern.num_used_chars == 3
    assert by_pattern.push("more") == ""
    by_string = stops(**both)
    assert by_string.push("a1EN") + by_string.push("D22") == "a1"
    assert by_string.matched == "END"


def test_at_the_same_character_the_string_counts() -> None:
    both = stops(stop=("ab",), stop_regex=("b",))
    assert both.push("ab") == ""
    assert both.matched == "ab"


def test_a_copy_of_both_is_independent() -> None:
    both = stops(stop_regex=("ab",))
    assert isinstance(both, PatternStops)
    both.push("a")
    twin = both.copy()
    both.push("b")
    assert (both.matched, twin.matched) == ("ab", None)
    assert twin.push("xab") == "xab"


@pytest.mark.parametrize("given", [("",), ("a" * 257,), ("a",) * 5, (5,)])
def test_the_form_of_patterns_is_checked(given: object) -> None:
    with pytest.raises(InvalidParameter):
        SamplingParams(stop_regex=given)  # type: ignore[arg-type]


def test_beams_have_no_patterns() -> None:
    with pytest.raises(InvalidParameter, match="use_beam_search"):
        SamplingParams(stop_regex=("a",), use_beam_search=True, n=2)
