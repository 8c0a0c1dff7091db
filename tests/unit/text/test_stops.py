"""StopStrings: the same result for any division, and only possible stops are held back."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from quire.text.stops import StopStrings
from tests.drawn import examples

_WORDS = st.text(alphabet="ab\n", min_size=1, max_size=5)


def _plain(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """Search the whole text at once: the match that ends first, the longest of those."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


@given(
    text=st.text(alphabet="ab\n", max_size=40),
    stops=st.lists(_WORDS, max_size=4, unique=True),
    at=st.lists(st.integers(0, 40), max_size=8),
    include=st.booleans(),
)
@example(text="aaab", stops=["aab"], at=[1, 2, 3], include=False)
@example(text="xabcd", stops=["abcd", "bc"], at=[], include=True)
@settings(max_examples=examples(600), deadline=None)
def test_the_result_does_not_depend_on_the_division(
    text: str, stops: list[str], at: list[int], include: bool
) -> None:
    watcher = StopStrings(stops, include=include)
    edges = [0, *sorted(min(place, len(text)) for place in at), len(text)]
    shown = ""
    for low, high in itertools.pairwise(edges):
        shown += watcher.push(text[low:high])
        if watcher.matched is None:
            seen = text[:high]
            waiting = seen[len(shown) :]
            assert watcher.num_held_chars == len(waiting)
            assert seen.startswith(shown)
            longest = max(
                (n for stop in stops for n in range(len(stop)) if seen.endswith(stop[:n])),
                default=0,
            )
            assert len(waiting) == longest  # held: what could still become a stop, no more
    shown += watcher.flush()
    assert (shown, watcher.matched) == _plain(text, stops, include)


def test_without_stop_strings_text_passes_at_once() -> None:
    watcher = StopStrings([])
    assert watcher.push("anything") == "anything"
    assert watcher.flush() == ""


def test_nothing_is_emitted_after_a_match() -> None:
    watcher = StopStrings(["END"])
    assert watcher.push("so be it END and more") == "so be it "
    assert watcher.num_used_chars == len("so be it END")
    assert watcher.push("more") == ""
    assert watcher.num_used_chars == 0
    assert watcher.flush() == ""


def test_matches_that_end_while_unarmed_do_not_count() -> None:
    watcher = StopStrings(["ab"])
    assert watcher.push("xab", armed=False) == "xab"
    assert watcher.push("a", armed=False) == ""
    assert watcher.push("b!") == "a"[:0]
    assert watcher.matched == "ab"
    assert watcher.num_used_chars == 1


def test_the_first_complete_match_wins_and_the_longest_of_those() -> None:
    watcher = StopStrings(["b", "ab", "abcdef"])
    assert watcher.push("xabcdef") == "x"
    assert watcher.matched == "ab"


def test_long_stop_strings_cost_one_step_per_character() -> None:
    stop = "a" * 1023 + "b"
    watcher = StopStrings([stop])
    steps = []
    automaton = watcher._automaton
    original = automaton.step
    automaton.step = lambda state, char: steps.append(1) or original(state, char)  # type: ignore
    assert watcher.push("a" * 5000 + "b") == "a" * (5001 - 1024)
    assert watcher.matched == stop
    assert len(steps) == 5000  # the first character only begins a string


def test_text_that_begins_no_stop_string_costs_no_step() -> None:
    watcher = StopStrings(["the end", "zebra"])
    watcher._automaton.step = lambda state, char: pytest.fail("a step")  # type: ignore
    assert watcher.push("a long fox\n" * 100) == "a long fox\n" * 100
