"""ThinkingBudget: how many tokens of an answer may be reasoning.

A part of a Grammar (grammar.py), so that it crosses to the engine with it; quire/structured
enforces it. Knows marks as texts, no tokens. Always holds: a budget is at least one token, and its
marks are short texts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from quire.base.errors import InvalidParameter
from quire.base.show import show

FIELD = "thinking_token_budget"
MAX_MARK_CHARS = 64
MAX_TOKENS = 2**31 - 1
_FORM = '{"max_tokens": 64, "opens": "<think>", "closes": "</think>", "is_open": true}'


@dataclass(frozen=True, slots=True, kw_only=True)
class ThinkingBudget:
    """At most max_tokens tokens after the mark `opens`, those of the mark `closes` included.

    is_open: the prompt ends with the opening mark. Without marks the answer is in channels
    (gpt-oss): the bodies of all messages of the channel `analysis` count together. param: the
    request's field it came from, which errors name.
    """

    max_tokens: int
    opens: str = ""
    closes: str = ""
    is_open: bool = False
    param: str = FIELD

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise too_small(self, 1)

    @property
    def form(self) -> dict[str, Any]:
        """Return the object that `thinking_budget_of` reads."""
        return {name: value for name, value in asdict(self).items() if name != "param"}


def thinking_budget_of(value: Any, *, param: str) -> ThinkingBudget:
    """Return the budget that an object of four fields asks for. Raises InvalidParameter."""
    known = {one.name for one in fields(ThinkingBudget)} - {"param"}
    marks = [value.get(n, "") for n in ("opens", "closes")] if isinstance(value, Mapping) else []
    if (
        not marks
        or value.keys() - known
        or not all(map(_is_mark, marks))
        or bool(marks[0]) != bool(marks[1])
        or not isinstance(value.get("is_open", False), bool)
        or type(max_tokens := value.get("max_tokens")) is not int
        or max_tokens > MAX_TOKENS
    ):
        raise InvalidParameter(
            f"{param}: thinking is {show(value)}; an object such as {_FORM} is allowed", param=param
        )
    opens, closes = marks
    return ThinkingBudget(
        max_tokens=max_tokens,
        opens=opens,
        closes=closes,
        is_open=value.get("is_open", False),
        param=param,
    )


def too_small(budget: ThinkingBudget, num_tokens: int) -> InvalidParameter:
    """Return the error of a budget that cannot hold the mark that ends the reasoning."""
    mark = f"the mark {budget.closes} that ends the reasoning" if budget.closes else "its end"
    return InvalidParameter(
        f"{budget.param} is {budget.max_tokens}; {mark} counts too, and is {num_tokens} "
        f"token{'s' * (num_tokens > 1)}: give at least {num_tokens}, or switch reasoning off",
        param=budget.param,
    )


def _is_mark(value: Any) -> bool:
    """Return whether a value is a mark, or "" for none."""
    return (
        isinstance(value, str)
        and len(value) <= MAX_MARK_CHARS
        and not any("\ud800" <= char <= "\udfff" for char in value)
    )
