"""Stop patterns: regular expressions over the text of an answer, matched as it grows.

llguidance follows "anything, then the pattern" byte by byte, by an automaton with bounded work and
states: no pattern backtracks. What it does not support (look-around, back references, anchors) is
refused when the pattern is compiled. Knows text only, no tokens. Always holds: a match is found
at its first possible end, whatever the pieces in which the text came.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from quire.base.errors import InvalidParameter
from quire.base.show import show
from quire.structured.vocabulary import byte_vocabulary

if TYPE_CHECKING:
    from llguidance import LLMatcher

# In llguidance's units; see limits.py. A pattern that needs more is refused, or ends its answer.
_INITIAL_FUEL, _STEP_FUEL, _STATES, _SYMBOLS = 200_000, 20_000, 4_000, 20_000
_KEPT = 64


class PatternFailed(Exception):
    """A pattern needs more states or work than are allowed."""


class StopPatterns:
    """Where the first of several patterns ends in one stream of text."""

    def __init__(self, patterns: Sequence[str]) -> None:
        self._patterns = tuple(patterns)
        self._matchers = [_compiled(pattern).deep_copy() for pattern in patterns]

    def copy(self) -> StopPatterns:
        """Return an independent copy."""
        twin = StopPatterns(())
        twin._patterns = self._patterns
        twin._matchers = [matcher.deep_copy() for matcher in self._matchers]
        return twin

    def push(self, text: str, *, armed: bool = True) -> tuple[int, str] | None:
        """Read more text; return how much of it a match takes, and its pattern; None without one.

        Unless armed, matches are ignored. Raises PatternFailed.
        """
        for place, character in enumerate(text):
            codes = list(character.encode(errors="replace"))
            for pattern, matcher in zip(self._patterns, self._matchers, strict=True):
                if not matcher.consume_tokens(codes):
                    raise PatternFailed(f"stop_regex {show(pattern)} needs too many states")
                if armed and matcher.is_accepting():
                    return place + 1, pattern
        return None


def check_patterns(patterns: Sequence[str]) -> None:
    """Compile patterns. Raises InvalidParameter for one that is not supported."""
    for pattern in patterns:
        _compiled(pattern)


@lru_cache(maxsize=_KEPT)
def _compiled(pattern: str) -> LLMatcher:
    """Return the matcher of a pattern, to be copied."""
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(
        initial_lexer_fuel=_INITIAL_FUEL,
        step_lexer_fuel=_STEP_FUEL,
        max_lexer_states=_STATES,
        max_grammar_size=_SYMBOLS,
        verbose_errors=False,
    )
    tokenizer = byte_vocabulary().tokenizer
    if _has_anchor(pattern):
        raise _refusal(pattern, "^, $ and \\b have no meaning in an answer that grows")
    # Alone, so that no pattern can close the group around it.
    own = LLMatcher(tokenizer, LLMatcher.grammar_from_regex(pattern), limits=limits)
    _check(pattern, own)
    if own.is_accepting():
        raise InvalidParameter(
            f"stop_regex is {show(pattern)}, which matches the empty text, and so would end the "
            "answer before its first character; give a pattern of at least one character",
            param="stop_regex",
        )
    source = LLMatcher.grammar_from_regex(f"(?s:.*)(?:{pattern})")
    matcher = LLMatcher(tokenizer, source, limits=limits)
    _check(pattern, matcher)
    return matcher


def _check(pattern: str, matcher: LLMatcher) -> None:
    if matcher.is_error():
        raise _refusal(pattern, matcher.get_error().split("\n")[0][:200])


def _refusal(pattern: str, why: str) -> InvalidParameter:
    return InvalidParameter(
        f"stop_regex is {show(pattern)}, which cannot be used: {why}; give a pattern without "
        "look-around, back references and anchors, with fewer or shorter repetitions",
        param="stop_regex",
    )


def _has_anchor(pattern: str) -> bool:
    """Return whether a pattern has an anchor, which llguidance would leave out in some places."""
    in_class = is_escaped = False
    for at, character in enumerate(pattern):
        if is_escaped:
            if character in "bBAzZGK" and not in_class:
                return True
            is_escaped = False
        elif character == "\\":
            is_escaped = True
        elif in_class:
            in_class = character != "]" or pattern[at - 1] == "["
        elif character == "[":
            in_class = True
        elif character in "^$":
            return True
    return False
