"""FieldSet: the request fields of one route, and what its errors say of other fields.

Used as the set of names that it is. Knows no API and no request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

Advice = Callable[[str, Mapping[str, Any]], str | None]


class FieldSet(frozenset[str]):
    """input_names: the fields with the input, as an error names them; "" for a prompt, messages or
    token ids. input_advice: how the input of another API is written here; "" to leave that out.
    advice: takes the name of another field and the body, and returns what follows "NAME is not a
    field of this request"; None for any other field."""

    input_names: str
    input_advice: str
    advice: Advice

    def __new__(
        cls,
        names: Iterable[str],
        *,
        input_names: str = "",
        input_advice: str = "",
        advice: Advice = lambda name, body: None,
    ) -> FieldSet:
        made = super().__new__(cls, names)
        made.input_names, made.input_advice, made.advice = input_names, input_advice, advice
        return made
