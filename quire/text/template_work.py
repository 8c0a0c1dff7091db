"""Account for the work of one template rendering, and bound the size of its values.

Every operation of a template is charged here: rounds (loops, calls, operations), bytes of new
values, and time, which is checked at each charge. To keep single steps short, values are measured
before they are traversed: comparing, hashing, sorting or printing a list of two entries may cost as
much as one of a million if each entry is such a list again. Knows no Jinja. Always holds: beyond a
limit LimitExceeded is raised, before the operation has any effect.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, Sized, ValuesView
from dataclasses import dataclass
from typing import Any

from jinja2.exceptions import SecurityError
from jinja2.utils import Namespace

# What of a text, list or object that is walked counts as a round.
_CHARS_A_ROUND = 1024
_ENTRIES_A_ROUND = 16
_BYTES_A_ROUND = 256
_BYTES_AN_ENTRY = 32
_CHARS_OF_OTHERS = 32  # at least what a float, None or a loop takes when it is written out
_FLAT = (bool, float, type(None))
_VIEWS = (ItemsView, KeysView, ValuesView)


class LimitExceeded(SecurityError):
    """A template exceeded a limit: rounds, size of a value, or time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of one rendering, far above the needs of published templates.

    num_rounds: loops, calls and operations. time_s: seconds. made_bytes: texts, lists and objects
    made, all together. text_chars, list_entries: of one value, everything inside it counted each
    time it occurs. depth: levels of lists in lists. width: characters filled up or indented by.
    number_bits: of a whole number.
    """

    num_rounds: int = 5_000_000
    time_s: float = 5.0
    made_bytes: int = 512 * 1024 * 1024
    text_chars: int = 16_000_000
    list_entries: int = 2_000_000
    depth: int = 100
    width: int = 10_000
    number_bits: int = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """How large a value is, all that is inside it counted each time it occurs.

    chars: at most how many characters its text has, but for escapes. entries: values inside.
    depth: levels; 1 for a text or a number.
    """

    chars: int
    entries: int
    depth: int


class Work:
    """The account of one rendering. clock_s: seconds that only go forward."""

    def __init__(self, limits: Limits, clock_s: Callable[[], float] = time.monotonic) -> None:
        self.limits = limits
        self.num_rounds = 0
        self.made_bytes = 0
        self._clock_s = clock_s
        self._end_s = clock_s() + limits.time_s

    def add(self, num_rounds: int) -> None:
        """Charge rounds, and look at the clock. Raises LimitExceeded."""
        self.num_rounds += num_rounds
        if self.num_rounds > self.limits.num_rounds:
            raise LimitExceeded(f"more than {self.limits.num_rounds} rounds of loops and calls")
        if self._clock_s() > self._end_s:
            raise LimitExceeded(f"more than {self.limits.time_s:g} seconds")

    def made(self, value: Any) -> Any:
        """Charge a value as newly made and return it; what is inside it was charged before."""
        if isinstance(value, str):
            self.check_chars(len(value))
        elif isinstance(value, list | tuple | dict):
            self.check_entries(len(value))
        else:
            return value
        self.make(sys.getsizeof(value))
        return value

    def make(self, num_bytes: int) -> None:
        """Charge so many bytes of new values. Raises LimitExceeded."""
        self.made_bytes += num_bytes
        if self.made_bytes > self.limits.made_bytes:
            raise LimitExceeded(f"more than {self.limits.made_bytes} bytes of texts and lists")
        self.add(1 + num_bytes // _BYTES_A_ROUND)

    def looked(self, value: Any) -> Extent:
        """Charge a value that is about to be walked as a whole, and return its extent."""
        if isinstance(value, str):
            self.check_chars(len(value))
            self.add(1 + len(value) // _CHARS_A_ROUND)
            return Extent(chars=len(value), entries=0, depth=1)
        if isinstance(value, _FLAT):
            return Extent(chars=_CHARS_OF_OTHERS, entries=0, depth=1)
        extent = self._extent(value)
        self.add(1 + extent.chars // _CHARS_A_ROUND + extent.entries // _ENTRIES_A_ROUND)
        return extent

    def consumed(self, items: Any) -> Any:
        """`items`, each of which is charged as a round and an object: now, or when it is taken."""
        if isinstance(items, Sized):
            self.check_entries(len(items))
            self.add(len(items))
            self.make(_BYTES_AN_ENTRY * len(items))
            return items
        return self._counting(items) if isinstance(items, Iterator) else items

    def gathered(self, items: Any) -> Any:
        """As `consumed`, with what comes one by one put into a list and the whole looked at."""
        if isinstance(items, Iterator):
            items = self.made(list(self._counting(items)))
        self.looked(items)
        return self.consumed(items)

    def check_chars(self, num_chars: int, what: str = "a text") -> None:
        """Raise LimitExceeded if a text of so many characters may not be made."""
        if num_chars > self.limits.text_chars:
            raise LimitExceeded(f"{what} of more than {self.limits.text_chars} characters")

    def check_width(self, value: Any) -> None:
        """Raise LimitExceeded for a number that asks for more room than `width`."""
        if isinstance(value, int) and abs(value) > self.limits.width:
            raise LimitExceeded(f"a width of more than {self.limits.width}")

    def check_number(self, value: Any) -> None:
        """Raise LimitExceeded for a whole number that is too long to reckon with."""
        if isinstance(value, int) and value.bit_length() > self.limits.number_bits:
            raise LimitExceeded(f"a number of more than {self.limits.number_bits} bits")

    def check_entries(self, num_entries: int) -> None:
        """Raise LimitExceeded if a list of so many entries may not be made."""
        if num_entries > self.limits.list_entries:
            raise LimitExceeded(f"a list of more than {self.limits.list_entries} entries")

    def _counting(self, items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            self.make(_BYTES_AN_ENTRY)
            yield item

    def _extent(self, value: Any) -> Extent:
        level, chars, entries, depth = [value], 0, 0, 0
        while level:
            depth += 1
            if depth > self.limits.depth:
                raise LimitExceeded(f"a list nested more than {self.limits.depth} levels deep")
            inner: list[Any] = []
            for item in level:
                chars += _own_chars(item)
                if isinstance(item, dict):
                    inner.extend(item)
                    inner.extend(item.values())
                elif isinstance(item, list | tuple):
                    inner.extend(item)
                elif isinstance(item, Namespace):
                    inner.append(item._Namespace__attrs)
                elif isinstance(item, _VIEWS):
                    self.check_entries(len(item))
                    inner.extend(item)
                if chars > self.limits.text_chars:
                    self.check_chars(chars, "a list with a text")
                self.check_entries(entries + len(inner))
            entries += len(inner)
            level = inner
        return Extent(chars=chars, entries=entries, depth=depth)


def _own_chars(item: Any) -> int:
    """Return characters an item adds to the text of what holds it, those of its entries aside."""
    if isinstance(item, str):
        return len(item) + 4
    if isinstance(item, int):
        return item.bit_length() // 3 + 8
    return _CHARS_OF_OTHERS
