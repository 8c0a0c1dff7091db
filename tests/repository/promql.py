"""Check PromQL expressions against the metrics of a server: brackets, functions, names, labels.

Not a parser of the whole language: it reads tokens, and knows what of it `deploy/` uses.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

FUNCTIONS = frozenset(
    {
        *("rate", "increase", "sum", "avg", "max", "min", "histogram_quantile", "max_over_time"),
    }
)
KEYWORDS = frozenset({"by", "without", "on", "ignoring", "group_left", "and", "or", "unless"})
# Followed by label names in parentheses.
_GROUPING = frozenset({"by", "without", "on", "ignoring", "group_left"})
# Labels that Prometheus or a histogram adds.
ADDED_LABELS = frozenset({"job", "instance", "le"})
# Prometheus' own series.
_OWN_SERIES: Mapping[str, frozenset[str]] = {"up": frozenset()}
_WINDOW = r"\[(?:\$__rate_interval|\d+[smhd])(?::\d+[smhd])?\]"
_KINDS = {
    "string": r'"(?:[^"\\]|\\.)*"',
    "window": _WINDOW,
    "number": r"\d+(?:\.\d+)?",
    "name": r"[a-zA-Z_]\w*",
    "operator": r"==|!=|>=|<=|=~|!~|[-+*/<>=(){},]",
}
_TOKEN = re.compile(r"\s*(?:" + "|".join(f"(?P<{n}>{p})" for n, p in _KINDS.items()) + ")")
_CLOSES = {"(": ")", "{": "}"}


class PromqlError(ValueError):
    """An expression that Prometheus refuses, or that names what no server exports."""


@dataclass(frozen=True, slots=True)
class _Token:
    kind: str
    text: str


def check(expression: str, exported: Mapping[str, frozenset[str]]) -> set[str]:
    """Return the names of series in an expression. Raises PromqlError.

    exported: the labels of each series by its name.
    """
    tokens = list(_tokens(expression))
    _check_brackets(tokens)
    series = exported | _OWN_SERIES
    used: set[str] = set()
    labels: set[str] = set()
    at = 0
    while at < len(tokens):
        token, follows = tokens[at], tokens[at + 1].text if at + 1 < len(tokens) else ""
        at += 1
        if token.kind != "name":
            continue
        if token.text in _GROUPING:
            if follows == "(":
                end = _end(tokens, at)
                labels.update(one.text for one in tokens[at + 1 : end] if one.kind == "name")
                at = end + 1
        elif token.text in FUNCTIONS:
            if follows != "(" and follows not in _GROUPING:
                raise PromqlError(f"{token.text} is a function without arguments")
        elif token.text not in KEYWORDS:
            if token.text not in series:
                raise PromqlError(f"{token.text} is no function and no exported series")
            used.add(token.text)
            if follows == "{":
                end = _end(tokens, at)
                _check_matchers(tokens[at + 1 : end], series[token.text])
                at = end + 1
    known = ADDED_LABELS.union(*(series[name] for name in used))
    if not used or not labels <= known:
        raise PromqlError(f"{sorted(labels - known)} are no labels of {sorted(used)}")
    return used


def _tokens(expression: str) -> Iterator[_Token]:
    at = 0
    while expression[at:].strip():
        match = _TOKEN.match(expression, at)
        if match is None:
            raise PromqlError(f"cannot be read from {expression[at : at + 20]!r} on")
        assert match.lastgroup is not None, "each alternative has a name"
        yield _Token(match.lastgroup, match[match.lastgroup])
        at = match.end()


def _check_brackets(tokens: list[_Token]) -> None:
    opened: list[str] = []
    for token in tokens:
        if token.text in _CLOSES:
            opened.append(_CLOSES[token.text])
        elif token.text in _CLOSES.values() and (not opened or opened.pop() != token.text):
            raise PromqlError(f"an unexpected {token.text}")
    if opened:
        raise PromqlError(f"{opened[-1]} is missing")


def _end(tokens: list[_Token], start: int) -> int:
    """Return where the bracket at `start` is closed; none is nested in it."""
    close = _CLOSES[tokens[start].text]
    return next(at for at in range(start, len(tokens)) if tokens[at].text == close)


def _check_matchers(tokens: list[_Token], labels: frozenset[str]) -> None:
    """Check `label="value", ...`."""
    for at in range(0, len(tokens), 4):
        kinds = [token.kind for token in tokens[at : at + 3]]
        between = [token.text for token in tokens[at + 3 : at + 4]]
        if kinds != ["name", "operator", "string"] or between not in ([], [","]):
            raise PromqlError('label matchers are label="value", separated by commas')
        if tokens[at].text not in labels | ADDED_LABELS:
            raise PromqlError(f"{tokens[at].text} is no label of this series")
