"""StopStrings: find stop strings in streamed text and cut the text there.

One automaton over all stop strings (Aho and Corasick, 1975) reads the text character by character,
so the result does not depend on how the text was split. The first complete match wins; of matches
that end at the same character, the longest. Only text that may still become a stop string is held
back. Knows no tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy


class StopStrings:
    """Matches stop strings in one stream of text.

    include: keep the stop string in the text. After a match, `matched` is the stop string, no
    more text is returned, and `num_used_chars` is the number of characters used of the last push.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._automaton = _Automaton(stops)
        self._include = include
        self._state = 0
        self._held = ""
        self.matched: str | None = None
        self.num_used_chars = 0

    def copy(self) -> StopStrings:
        """Return an independent copy."""
        return copy(self)

    @property
    def num_held_chars(self) -> int:
        """Return the number of characters held back."""
        return len(self._held)

    def push(self, text: str, *, armed: bool = True) -> str:
        """Add text; return what cannot become a stop string. Unless armed, matches are ignored."""
        if self.matched is not None:
            self.num_used_chars = 0
            return ""
        automaton, state = self._automaton, self._state
        step, begins, longest = automaton.step, automaton.begins, automaton.longest
        for place, character in enumerate(text):
            state = step(state, character) if state else begins.get(character, 0)
            if state and armed and (stop := longest[state]) is not None:
                return self._match(stop, text[: place + 1])
        self._state = state
        self.num_used_chars = len(text)
        seen = self._held + text
        cut = len(seen) - automaton.num_open[state]
        self._held = seen[cut:]
        return seen[:cut]

    def flush(self) -> str:
        """End the stream and return the text held back."""
        text, self._held = self._held, ""
        return text

    def _match(self, stop: str, used: str) -> str:
        seen = self._held + used
        self._held = ""
        self.matched = stop
        self.num_used_chars = len(used)
        return seen if self._include else seen[: -len(stop)]


class _Automaton:
    """States are prefixes of stop strings; state 0 is the empty one.

    num_open: how many of the last characters could still become a stop string. longest: the
    longest stop string that ends there. begins: the states after one character from state 0.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self._fallback = [0]
        self.num_open = [0]
        self.longest: list[str | None] = [None]
        for stop in stops:
            self._add(stop)
        self.begins = self._next[0]
        self._link()

    def step(self, state: int, character: str) -> int:
        following = self._next
        while state and character not in following[state]:
            state = self._fallback[state]
        return following[state].get(character, 0)

    def _add(self, stop: str) -> None:
        state = 0
        for character in stop:
            after = self._next[state].get(character)
            if after is None:
                after = self._next[state][character] = len(self._next)
                self._next.append({})
                self._fallback.append(0)
                self.num_open.append(self.num_open[state] + 1)
                self.longest.append(None)
            state = after
        self.longest[state] = stop

    def _link(self) -> None:
        """Set each state's fallback to its longest proper suffix, shorter prefixes first."""
        order = [0]
        for state in order:
            for character, after in self._next[state].items():
                order.append(after)
                if state:
                    self._fallback[after] = self.step(self._fallback[state], character)
                if not self._next[after]:  # complete: only its suffixes can go on
                    self.num_open[after] = self.num_open[self._fallback[after]]
                if self.longest[after] is None:
                    self.longest[after] = self.longest[self._fallback[after]]
