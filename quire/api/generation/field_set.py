"""FieldSet: the request fields of one route, and what its errors say of other fields.

Used as the set of names that it is. Knows no API and no request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable


class FieldSet(frozenset[str]):
    """takes: the fields with the input, as an error names them; "" for a prompt, messages or token
    ids. how: how the input of another API is written here; "" to leave that out. advice: returns
    what to do about another field, to follow "NAME is not a field of this request"; None for a
    field of which it knows nothing."""

    takes: str
    how: str
    advice: Callable[[str], str | None]

    def __new__(
        cls,
        names: Iterable[str],
        *,
        takes: str = "",
        how: str = "",
        advice: Callable[[str], str | None] = lambda name: None,
    ) -> FieldSet:
        made = super().__new__(cls, names)
        made.takes, made.how, made.advice = takes, how, advice
        return made
